// SPDX-License-Identifier: Apache-2.0
/*
 * Runs a fuzz target over files, without libFuzzer, so that the committed corpus is part of every suite.
 *
 * Happy path: every argument that is no option is a file or a folder of files; each file is given to the target in
 * memory of exactly its size, so that a read beyond it is seen by the sanitizers.
 *
 * Failure modes: a file that cannot be read, or no file at all, ends with 1; a defect ends the process as it does.
 */
#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes);

static size_t replayed_count;

static bool replay_file(const char *path, size_t len_bytes)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data = malloc(len_bytes > 0 ? len_bytes : 1);
    bool ok = file && data && fread(data, 1, len_bytes, file) == len_bytes;
    if (ok) {
        LLVMFuzzerTestOneInput(data, len_bytes);
        replayed_count++;
    } else {
        fprintf(stderr, "%s: cannot be read: %s\n", path, strerror(errno));
    }
    free(data);
    if (file) fclose(file);
    return ok;
}

static bool replay_path(const char *path);

static bool replay_folder(const char *path)
{
    struct dirent **entries = NULL;
    int count = scandir(path, &entries, NULL, alphasort);
    bool ok = count >= 0;
    for (int i = 0; i < count; i++) {
        char *child = NULL;
        if (entries[i]->d_name[0] != '.' && asprintf(&child, "%s/%s", path, entries[i]->d_name) >= 0) {
            ok = replay_path(child) && ok;
            free(child);
        }
        free(entries[i]);
    }
    free(entries);
    return ok;
}

static bool replay_path(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return false;
    }
    return S_ISDIR(st.st_mode) ? replay_folder(path) : replay_file(path, (size_t)st.st_size);
}

int main(int argc, char **argv)
{
    bool ok = true;
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-') ok = replay_path(argv[i]) && ok;
    }
    if (ok && replayed_count == 0) fprintf(stderr, "no inputs\n");
    printf("%zu inputs replayed\n", replayed_count);
    return ok && replayed_count > 0 ? 0 : 1;
}
