// SPDX-License-Identifier: Apache-2.0
#include "server/tls_options.h"

bool tl_tls_options_of(const struct tl_settings *settings, struct tl_tls_options *ret_options)
{
    const struct tl_security_settings *security = &settings->security;
    if (security->ca == NULL) return false;
    *ret_options = (struct tl_tls_options){
        .settings = {.ca = security->ca,
                     .certificate = security->certificate,
                     .key = security->key,
                     .crl = security->crl,
                     .foreign_names = security->foreign_names,
                     .is_tls12_allowed = security->min_version == TL_TLS_1_2},
        .handshake_timeout_ns = settings->connect_timeout_ns,
        .keepalive_timeout_ns = settings->keepalive_timeout_ns,
    };
    return true;
}
