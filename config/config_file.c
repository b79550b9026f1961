// SPDX-License-Identifier: Apache-2.0
/*
 * Reads a configuration from a file or from standard input.
 *
 * Happy path: the whole file is read, its folder is where relative paths in it start. Failure modes: the file cannot be
 * opened or read, with errno's reason; it is larger than any configuration, and reading stops there.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "config/config.h"
#include "config/config_private.h"
#include "config/json_doc.h"

#define FIRST_BYTES ((size_t)16384)

struct contents {
    char *text;
    size_t len_bytes;
    size_t capacity;
};

/* Provides space for at least one more byte. False: no memory. */
static bool grow(struct contents *contents)
{
    if (contents->len_bytes < contents->capacity) return true;
    size_t capacity = contents->capacity ? contents->capacity * 2 : FIRST_BYTES;
    char *text = realloc(contents->text, capacity);
    if (!text) return false;
    contents->text = text;
    contents->capacity = capacity;
    return true;
}

/* Reads to the end, or one byte more than is allowed, which the parser then refuses. */
static enum tl_status read_all(int fd, const char *source, struct contents *contents, struct tl_error *ret_error)
{
    while (contents->len_bytes <= TL_JSON_MAX_BYTES) {
        if (!grow(contents)) return tl_json_no_memory(source, ret_error);
        ssize_t count = read(fd, contents->text + contents->len_bytes, contents->capacity - contents->len_bytes);
        if (count == 0) return TL_OK;
        if (count < 0 && errno == EINTR) continue;
        if (count < 0)
            return tl_error_set_errno(ret_error, errno, "%s: cannot read the configuration",
                                      tl_json_shown_source(source));
        contents->len_bytes += (size_t)count;
    }
    return TL_OK;
}

/* The folder of a file, NULL for the current one. False: no memory. */
static bool folder_of(const char *path, char **ret_folder)
{
    *ret_folder = NULL;
    const char *slash = strrchr(path, '/');
    if (!slash) return true;
    size_t length = slash == path ? 1 : (size_t)(slash - path);
    *ret_folder = strndup(path, length);
    return *ret_folder != NULL;
}

static enum tl_status read_file(const char *path, bool is_alone, struct tl_config **ret_config,
                                struct tl_config_errors *ret_errors, struct tl_error *ret_error)
{
    if (ret_errors) ret_errors->count = 0;
    bool is_stdin = strcmp(path, "-") == 0;
    const char *source = is_stdin ? "stdin" : path;
    int fd = is_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return tl_error_set_errno(ret_error, errno, "%s: cannot open the configuration", tl_json_shown_source(path));
    struct contents contents = {0};
    char *folder = NULL;
    enum tl_status status = read_all(fd, source, &contents, ret_error);
    if (!is_stdin) close(fd);
    if (status == TL_OK && !is_stdin && !folder_of(path, &folder)) status = tl_json_no_memory(source, ret_error);
    if (status == TL_OK) {
        const struct tl_config_source from = {.name = source,
                                              .folder = folder,
                                              .text = contents.text,
                                              .len_bytes = contents.len_bytes,
                                              .is_alone = is_alone};
        status = tl_config_parse_source(&from, ret_config, ret_errors, ret_error);
    }
    free(folder);
    free(contents.text);
    return status;
}

enum tl_status tl_config_read_all_errors(const char *path, struct tl_config **ret_config,
                                         struct tl_config_errors *ret_errors, struct tl_error *ret_error)
{
    return read_file(path, false, ret_config, ret_errors, ret_error);
}

enum tl_status tl_config_read_settings(const char *path, struct tl_config **ret_config, struct tl_error *ret_error)
{
    return read_file(path, true, ret_config, NULL, ret_error);
}

enum tl_status tl_config_read(const char *path, struct tl_config **ret_config, struct tl_error *ret_error)
{
    return tl_config_read_all_errors(path, ret_config, NULL, ret_error);
}
