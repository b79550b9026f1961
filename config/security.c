// SPDX-License-Identifier: Apache-2.0
/*
 * Checks the settings of "security", and finds the files of one process.
 *
 * Failure modes: an error names the setting that was set last among those that contradict each other, and what to do.
 */
#include "config/security.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"

#define NAME "{name}"
#define AT(member) offsetof(struct tl_settings, member)

/* -------------------------------------------------------------------------------------------------------- check -- */

static const struct tl_setting_origin *origin_at(const struct tl_settings_layer *layer, size_t offset)
{
    return &layer->origins[tl_settings_find(offset)];
}

/* The place of the setting that was set last, [count]. One of them was set in the file. */
static struct tl_json_value last_place(const struct tl_settings_layer *layer, const size_t *offsets, size_t count,
                                       struct tl_json_doc *doc)
{
    const struct tl_setting_origin *last = origin_at(layer, offsets[0]);
    for (size_t i = 1; i < count; i++) {
        const struct tl_setting_origin *origin = origin_at(layer, offsets[i]);
        if (origin->level > last->level) last = origin;
    }
    return (struct tl_json_value){.doc = doc, .node = last->node};
}

/* Certificates, and what needs them. */
static enum tl_status check_tls(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                struct tl_error *ret_error)
{
    static const size_t files[] = {AT(security.ca), AT(security.certificate), AT(security.key)};
    static const size_t allow = AT(security.allow), encrypt = AT(security.encrypt), crl = AT(security.crl),
                        min_version = AT(security.min_version);
    const struct tl_security_settings *security = &layer->settings.security;
    const char *missing = !security->ca ? "ca" : !security->certificate ? "certificate" : !security->key ? "key" : NULL;
    if (!missing) return TL_OK;
    if (security->ca || security->certificate || security->key) {
        struct tl_json_value place = last_place(layer, files, TL_ARRAY_COUNT(files), doc);
        return tl_json_fail(&place, TL_INVALID_ARGUMENT, ret_error,
                            "\"%s\" is missing; \"ca\", \"certificate\" and \"key\" belong together: set all three, or "
                            "none",
                            missing);
    }
    const size_t *needing = origin_at(layer, allow)->level != TL_LEVEL_DEFAULT ? &allow
                            : security->encrypt == TL_ENCRYPT_REQUIRE          ? &encrypt
                            : security->crl                                    ? &crl
                            : security->min_version != TL_TLS_1_3              ? &min_version
                                                                               : NULL;
    if (!needing) return TL_OK;
    struct tl_json_value place = last_place(layer, needing, 1, doc);
    return tl_json_fail(&place, TL_INVALID_ARGUMENT, ret_error,
                        "without certificates this protects nothing; set \"ca\", \"certificate\" and \"key\" of "
                        "security.tls, or remove it");
}

/* What is to be encrypted cannot travel over RDMA. */
static enum tl_status check_rdma(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                 struct tl_error *ret_error)
{
    static const size_t rdma[] = {AT(security.encrypt), AT(rdma)}, protocol[] = {AT(security.encrypt), AT(protocol)};
    const struct tl_settings *settings = &layer->settings;
    bool is_protocol = settings->protocol == TL_PROTOCOL_GRPC_VERBS || settings->protocol == TL_PROTOCOL_GRPC_GDR;
    if (settings->security.encrypt != TL_ENCRYPT_REQUIRE) return TL_OK;
    if (!is_protocol && settings->rdma != TL_RDMA_REQUIRE) return TL_OK;
    struct tl_json_value place = last_place(layer, is_protocol ? protocol : rdma, 2, doc);
    return tl_json_fail(&place, TL_INVALID_ARGUMENT, ret_error,
                        "%s is %s, and security.encrypt is \"require\", but nothing encrypts what RDMA carries; write "
                        "%s, or encrypt \"prefer\"",
                        is_protocol ? "protocol" : "rdma", origin_at(layer, is_protocol ? protocol[1] : rdma[1])->value,
                        is_protocol ? "protocol \"auto\"" : "rdma \"prefer\"");
}

enum tl_status tl_security_check(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                 struct tl_error *ret_error)
{
    for (size_t i = 0; i < tl_settings_count; i++) {
        const char *group = tl_settings_table[i].group;
        if (group && strcmp(group, "security") == 0 && layer->origins[i].is_refused) return TL_OK;
    }
    enum tl_status status = tl_json_collect(doc, check_tls(layer, doc, ret_error), ret_error);
    if (status != TL_OK) return status;
    return tl_json_collect(doc, check_rdma(layer, doc, ret_error), ret_error);
}

/* -------------------------------------------------------------------------------------------------------- files -- */

static const size_t file_offsets[TL_SECURITY_FILE_COUNT] = {AT(security.ca), AT(security.certificate), AT(security.key),
                                                            AT(security.crl)};

/* The text with every NAME replaced. NULL: no memory. */
static const char *name_file(const char *file, const char *name, struct tl_arena *arena)
{
    const char *place = file;
    while (place && (place = strstr(place, NAME)) != NULL) {
        size_t front = (size_t)(place - file);
        file = tl_arena_format(arena, "%.*s%s%s", (int)front, file, name, place + strlen(NAME));
        place = file ? file + front + strlen(name) : NULL;
    }
    return file;
}

bool tl_security_name_files(struct tl_settings *settings, const struct tl_config_task *task, struct tl_arena *arena,
                            struct tl_security_files *ret_files)
{
    const char *name = NULL;
    for (size_t i = 0; i < TL_SECURITY_FILE_COUNT; i++) {
        const struct tl_setting *setting = &tl_settings_table[tl_settings_find(file_offsets[i])];
        const char **file = (const char **)((char *)settings + setting->offset);
        if (!*file || !strstr(*file, NAME)) continue;
        if (!name) name = task ? tl_arena_format(arena, "%s-%" PRIu32, task->job, task->index) : "client";
        if (name) *file = name_file(*file, name, arena);
        if (name && *file) ret_files->values[i] = tl_setting_format(setting, settings, arena);
        if (!ret_files->values[i]) return false;
    }
    return true;
}

const char *tl_security_file_value(const struct tl_security_files *files, const struct tl_setting *setting)
{
    for (size_t i = 0; i < TL_SECURITY_FILE_COUNT; i++) {
        if (setting->offset == file_offsets[i]) return files->values[i];
    }
    return NULL;
}
