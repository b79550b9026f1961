// SPDX-License-Identifier: Apache-2.0
#include "server/peers/permissions.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <xxhash.h>

#include "base/check.h"
#include "base/error.h"
#include "base/log.h"
#include "base/log_limit.h"

/* Those who may, in a message. */
#define MAX_ALLOWED_BYTES 256

/* A task of the cluster. */
struct member {
    uint64_t hash; /* hash of its name */
    const char *name;
};

struct tl_permissions {
    struct member *members; /* [member_count], by hash */
    size_t member_count;
    struct tl_security_settings settings;
    char self[TL_MAX_NAME_BYTES];
    uint64_t refused;              /* atomic */
    struct tl_log_limit log_limit; /* for each caller */
};

static uint64_t hash_of(const char *name)
{
    return XXH3_64bits(name, strlen(name));
}

static int compare_members(const void *left, const void *right)
{
    const struct member *a = left, *b = right;
    return a->hash != b->hash ? (a->hash < b->hash ? -1 : 1) : strcmp(a->name, b->name);
}

enum tl_status tl_permissions_create(const struct tl_config *config, const struct tl_security_settings *settings,
                                     const char *self, struct tl_permissions **ret_permissions,
                                     struct tl_error *ret_error)
{
    struct tl_permissions *permissions = calloc(1, sizeof(*permissions));
    if (permissions != NULL) permissions->members = calloc(config->task_count + 1, sizeof(*permissions->members));
    if (permissions == NULL || permissions->members == NULL) {
        free(permissions);
        return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a worker");
    }
    permissions->member_count = config->task_count;
    for (size_t i = 0; i < config->task_count; i++) {
        const char *name = config->tasks[i].name;
        permissions->members[i] = (struct member){.hash = hash_of(name), .name = name};
    }
    qsort(permissions->members, permissions->member_count, sizeof(*permissions->members), compare_members);
    permissions->settings = *settings;
    snprintf(permissions->self, sizeof(permissions->self), "%s", self[0] != '\0' ? self : "this process");
    tl_log_limit_init(&permissions->log_limit);
    *ret_permissions = permissions;
    return TL_OK;
}

void tl_permissions_destroy(struct tl_permissions *permissions)
{
    if (permissions == NULL) return;
    tl_log_limit_fini(&permissions->log_limit);
    free(permissions->members);
    free(permissions);
}

/* ------------------------------------------------------------------------------------------------------- rules -- */

/* A certificate may be for a task that the cluster does not have any more. */
static bool is_member(const struct tl_permissions *permissions, const struct tl_identity *caller)
{
    if (!caller->is_member) return false;
    const struct member wanted = {.hash = hash_of(caller->certified), .name = caller->certified};
    return bsearch(&wanted, permissions->members, permissions->member_count, sizeof(wanted), compare_members) != NULL;
}

static bool is_role(const struct tl_permissions *permissions, const struct tl_role *role,
                    const struct tl_identity *caller)
{
    switch (role->kind) {
    case TL_ROLE_ANY:
        return true;
    case TL_ROLE_MEMBER:
        return is_member(permissions, caller);
    case TL_ROLE_JOB:
        return caller->is_member && strncmp(caller->certified, role->name, strlen(role->name)) == 0 &&
               is_member(permissions, caller);
    case TL_ROLE_TASK:
        return caller->is_member && strcmp(caller->certified, role->name) == 0;
    case TL_ROLE_TRUST_DOMAIN:
        return !caller->is_member && strncmp(caller->certified, role->name, strlen(role->name)) == 0;
    case TL_ROLE_CLIENT:
        break;
    }
    if (caller->is_member) return false;
    /* Case makes no difference in a DNS name, and does in the path of a URI. */
    bool is_uri = strstr(role->name, "://") != NULL;
    return (is_uri ? strcmp(caller->certified, role->name) : strcasecmp(caller->certified, role->name)) == 0;
}

static bool has_rule(const struct tl_permissions *permissions, const struct tl_identity *caller, enum tl_action action)
{
    for (size_t i = 0; i < permissions->settings.allow_count; i++) {
        const struct tl_allow_rule *rule = &permissions->settings.allow[i];
        if ((rule->actions & 1U << action) == 0) continue;
        for (size_t j = 0; j < rule->role_count; j++)
            if (is_role(permissions, &rule->roles[j], caller)) return true;
    }
    return false;
}

/* ----------------------------------------------------------------------------------------------------- refusal -- */

/* Writes the roles that have the action, as many as fit. */
static void list_allowed(const struct tl_permissions *permissions, enum tl_action action, char text[MAX_ALLOWED_BYTES])
{
    size_t len = 0;
    text[0] = '\0';
    for (size_t i = 0; i < permissions->settings.allow_count; i++) {
        const struct tl_allow_rule *rule = &permissions->settings.allow[i];
        for (size_t j = 0; (rule->actions & 1U << action) != 0 && j < rule->role_count; j++) {
            const char *word = rule->roles[j].word, *separator = len > 0 ? ", " : "";
            bool fits = len + strlen(separator) + strlen(word) + sizeof(", ...") <= MAX_ALLOWED_BYTES;
            len += (size_t)snprintf(text + len, MAX_ALLOWED_BYTES - len, "%s%s", separator, fits ? word : "...");
            if (!fits) return;
        }
    }
    if (len == 0) snprintf(text, MAX_ALLOWED_BYTES, "no caller");
}

static enum tl_status refuse(struct tl_permissions *permissions, const struct tl_identity *caller,
                             enum tl_action action, struct tl_error *ret_error)
{
    char allowed[MAX_ALLOWED_BYTES];
    struct tl_error error;
    const char *name = caller->certified[0] != '\0' ? caller->certified : "a caller without a certificate";
    list_allowed(permissions, action, allowed);
    enum tl_status status = tl_error_set(&error, TL_PERMISSION_DENIED,
                                         "%s may not %s%s at %s: security.allow gives \"%s\" to %s; add a rule there",
                                         name, action == TL_ACTION_PEERS ? "see " : "", tl_action_names[action],
                                         permissions->self, tl_action_names[action], allowed);
    uint64_t refused = __atomic_add_fetch(&permissions->refused, 1, __ATOMIC_RELAXED);
    if (tl_log_limit_passes(&permissions->log_limit, name)) {
        TL_LOG_AT_WARN("a caller was refused", TL_STR("caller", name), TL_STR("action", tl_action_names[action]),
                       TL_STR("address", caller->address), TL_STR("reason", error.message), TL_U64("refused", refused));
    }
    (void)tl_error_copy(ret_error, &error);
    return status;
}

bool tl_permissions_allow(const struct tl_permissions *permissions, const struct tl_identity *caller,
                          enum tl_action action)
{
    if (permissions == NULL || action == TL_ACTION_HEALTH) return true;
    if (caller->source != TL_IDENTITY_PROVEN || caller->certified[0] == '\0') return false;
    bool is_self = caller->is_member && strcmp(caller->certified, permissions->self) == 0;
    return is_self || has_rule(permissions, caller, action);
}

enum tl_status tl_permissions_check(struct tl_permissions *permissions, const struct tl_identity *caller,
                                    enum tl_action action, struct tl_error *ret_error)
{
    if (tl_permissions_allow(permissions, caller, action)) return TL_OK;
    return refuse(permissions, caller, action, ret_error);
}

uint64_t tl_permissions_refused(const struct tl_permissions *permissions)
{
    return permissions != NULL ? __atomic_load_n(&permissions->refused, __ATOMIC_RELAXED) : 0;
}
