// SPDX-License-Identifier: Apache-2.0
/*
 * What a probe's call carries.
 *
 * Files of certificates and keys are read whole. What they hold is only looked at for the lines that begin and end such
 * a thing: whether TLS takes it is found out when it is used.
 */
#include "server/cli/probe_call.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

#define MAX_PEM_BYTES ((size_t)4 << 20)

bool tl_probe_flags_are_used(const struct tl_probe_flags *flags)
{
    return flags->headers.count > 0 || flags->is_gzip || flags->has_tls || flags->is_unverified || flags->ca_path ||
           flags->cert_path || flags->key_path || flags->server_name;
}

int tl_probe_flags_check(const struct tl_probe_flags *flags, const struct tl_options *options)
{
    const char *lonely = flags->is_unverified ? "no-verify"
                         : flags->ca_path     ? "ca-cert"
                         : flags->cert_path   ? "client-cert"
                         : flags->key_path    ? "client-key"
                         : flags->server_name ? "server-name"
                                              : NULL;
    if (!flags->has_tls && lonely) return tl_options_refuse(options, "-tls-%s has no effect without -tls", lonely);
    if (!flags->cert_path != !flags->key_path)
        return tl_options_refuse(options, "-tls-client-cert and -tls-client-key belong together");
    if (flags->is_unverified && flags->ca_path)
        return tl_options_refuse(options, "-tls-ca-cert would not be used with -tls-no-verify; leave one out");
    if (flags->is_unverified && flags->server_name)
        return tl_options_refuse(options, "-tls-server-name would not be used with -tls-no-verify; leave one out");
    return -1;
}

/* ----------------------------------------------------------------------------------------------------- headers -- */

/* "Name: value" -> "name" and "value". */
static enum tl_status split_header(const char *text, struct tl_call_header *ret_header, struct tl_error *ret_error)
{
    const char *colon = strchr(text, ':');
    if (!colon)
        return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "-rpc-header '%s' has no colon; write 'name: value'", text);
    char *name = strdup(text);
    if (!name) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for a header");
    char *value = name + (colon - text);
    *value++ = '\0';
    for (char *c = name; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    *ret_header = (struct tl_call_header){.name = name, .value = value + strspn(value, " \t\r\n\v\f")};
    return TL_OK;
}

static enum tl_status read_headers(struct tl_probe_call *call, const struct tl_probe_flags *flags,
                                   struct tl_error *ret_error)
{
    call->headers = calloc(flags->headers.count + 1, sizeof(*call->headers));
    if (!call->headers) return tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for headers");
    for (size_t i = 0; i < flags->headers.count; i++) {
        enum tl_status status = split_header(flags->headers.items[i], &call->headers[i], ret_error);
        if (status != TL_OK) return status;
        call->header_count++;
    }
    return TL_OK;
}

/* --------------------------------------------------------------------------------------------------------- TLS -- */

static enum tl_status read_file(const char *flag, const char *path, char **ret_text, struct tl_error *ret_error)
{
    FILE *file = fopen(path, "re");
    char *text = file ? calloc(1, MAX_PEM_BYTES + 1) : NULL;
    if (!file) return tl_error_set_errno(ret_error, errno, "-tls-%s: cannot read %s", flag, path);
    enum tl_status status = TL_OK;
    size_t len = text ? fread(text, 1, MAX_PEM_BYTES, file) : 0;
    if (!text) {
        status = tl_error_set(ret_error, TL_RESOURCE_EXHAUSTED, "no memory for %s", path);
    } else if (ferror(file)) {
        status = tl_error_set_errno(ret_error, errno, "-tls-%s: cannot read %s", flag, path);
    } else if (len == MAX_PEM_BYTES || strlen(text) != len) {
        status = tl_error_set(ret_error, TL_INVALID_ARGUMENT, "-tls-%s: %s is not a PEM file", flag, path);
    }
    fclose(file);
    if (status == TL_OK) {
        *ret_text = text;
    } else {
        free(text);
    }
    return status;
}

/* Reads a file that has "-----BEGIN ... WHAT-----"; path NULL: none. */
static enum tl_status read_pem(const char *flag, const char *path, const char *what, char **ret_text,
                               struct tl_error *ret_error)
{
    if (!path) return TL_OK;
    enum tl_status status = read_file(flag, path, ret_text, ret_error);
    if (status != TL_OK) return status;
    const char *begin = strstr(*ret_text, "-----BEGIN ");
    if (begin && strstr(begin, what)) return TL_OK;
    return tl_error_set(ret_error, TL_INVALID_ARGUMENT, "-tls-%s: %s has no %.*s in PEM", flag, path,
                        (int)strcspn(what, "-"), what);
}

static enum tl_status read_tls(struct tl_probe_call *call, const struct tl_probe_flags *flags,
                               struct tl_error *ret_error)
{
    enum tl_status status = read_pem("ca-cert", flags->ca_path, "CERTIFICATE-----", &call->root_certs, ret_error);
    if (status == TL_OK)
        status = read_pem("client-cert", flags->cert_path, "CERTIFICATE-----", &call->cert_chain, ret_error);
    if (status == TL_OK)
        status = read_pem("client-key", flags->key_path, "PRIVATE KEY-----", &call->private_key, ret_error);
    call->tls = (struct tl_call_tls){.root_certs = call->root_certs,
                                     .cert_chain = call->cert_chain,
                                     .private_key = call->private_key,
                                     .server_name = flags->server_name,
                                     .is_unverified = flags->is_unverified};
    return status;
}

enum tl_status tl_probe_call_init(struct tl_probe_call *call, const struct tl_probe_flags *flags,
                                  struct tl_call_options *options, struct tl_error *ret_error)
{
    *call = (struct tl_probe_call){0};
    enum tl_status status = read_headers(call, flags, ret_error);
    if (status == TL_OK && flags->has_tls) status = read_tls(call, flags, ret_error);
    if (status != TL_OK) return status;
    options->headers = call->headers;
    options->header_count = call->header_count;
    options->tls = flags->has_tls ? &call->tls : NULL;
    options->is_gzip = flags->is_gzip;
    return TL_OK;
}

void tl_probe_call_fini(struct tl_probe_call *call)
{
    for (size_t i = 0; i < call->header_count; i++)
        free((char *)call->headers[i].name);
    free(call->headers);
    free(call->root_certs);
    free(call->cert_chain);
    free(call->private_key);
    *call = (struct tl_probe_call){0};
}
