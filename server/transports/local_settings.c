// SPDX-License-Identifier: Apache-2.0
#include "server/transports/local_settings.h"

#include <pwd.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define MAX_NAME_BYTES 64
/* For what getpwnam_r has to say of one user. */
#define USER_BYTES 16384

const char *tl_local_settings_refusal(const struct tl_settings *settings)
{
    switch (settings->protocol) {
    case TL_PROTOCOL_GRPC:
        return "the protocol is grpc";
    case TL_PROTOCOL_GRPC_VERBS:
        return "the protocol is grpc+verbs";
    case TL_PROTOCOL_AUTO:
    case TL_PROTOCOL_GRPC_LOCAL:
        break;
    }
    return NULL;
}

static enum tl_status find_user(const char *entry, size_t len, uid_t *ret_uid, struct tl_error *ret_error)
{
    char name[MAX_NAME_BYTES], text[USER_BYTES];
    struct passwd user, *found = NULL;
    if (entry[0] >= '0' && entry[0] <= '9') {
        *ret_uid = (uid_t)strtoul(entry, NULL, 10);
        return TL_OK;
    }
    if (len >= sizeof(name)) len = sizeof(name) - 1;
    memcpy(name, entry, len);
    name[len] = '\0';
    int code = getpwnam_r(name, &user, text, sizeof(text), &found);
    if (found == NULL) {
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT,
                            "there is no user %s on this machine%s%s; correct local.users, or write the number", name,
                            code != 0 ? ": " : "", code != 0 ? strerror(code) : "");
    }
    *ret_uid = user.pw_uid;
    return TL_OK;
}

enum tl_status tl_local_settings_read(const struct tl_settings *settings, uid_t ret_users[TL_LOCAL_MAX_USERS],
                                      struct tl_local_options *ret_options, struct tl_error *ret_error)
{
    const struct tl_local_settings *local = &settings->local;
    struct tl_local_options options = {.socket_folder = local->socket_folder,
                                       .users = ret_users,
                                       .is_reading_forbidden = local->process_vm == TL_PROCESS_VM_OFF};
    options.is_any_user_allowed = local->users != NULL && strcmp(local->users, "any") == 0;
    const char *entry = local->users != NULL && !options.is_any_user_allowed ? local->users : "";
    while (*entry != '\0' && options.user_count < TL_LOCAL_MAX_USERS) {
        size_t len = strcspn(entry, ",");
        enum tl_status status = find_user(entry, len, &ret_users[options.user_count++], ret_error);
        if (status != TL_OK) return status;
        entry += len + (entry[len] == ',');
    }
    *ret_options = options;
    return TL_OK;
}
