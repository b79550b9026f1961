// SPDX-License-Identifier: Apache-2.0
#include "control/credentials.h"

#include <grpc/compression.h>
#include <grpc/grpc_posix.h>
#include <stddef.h>

#include <tensorlane/version.h>

#include "base/check.h"
#include "base/clock.h"
#include "control/client.h"

grpc_server_credentials *tl_credentials_for_server(void)
{
    return grpc_insecure_server_credentials_create();
}

static grpc_arg integer_arg(const char *key, int value)
{
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)key};
    arg.value.integer = value;
    return arg;
}

/* The current core has renamed the providers of certificates that 1.51 has. */
static void set_identity(grpc_tls_credentials_options *options, const struct tl_call_tls *tls)
{
    grpc_tls_identity_pairs *pairs = grpc_tls_identity_pairs_create();
    grpc_tls_identity_pairs_add_pair(pairs, tls->private_key, tls->cert_chain);
#ifdef TENSORLANE_GRPC_CURRENT
    grpc_tls_certificate_provider *provider = grpc_tls_certificate_provider_in_memory_create();
    (void)grpc_tls_certificate_provider_in_memory_set_identity_certificate(provider, pairs);
    grpc_tls_credentials_options_set_identity_certificate_provider(options, provider);
#else
    grpc_tls_certificate_provider *provider = grpc_tls_certificate_provider_static_data_create(NULL, pairs);
    grpc_tls_credentials_options_set_certificate_provider(options, provider);
    grpc_tls_credentials_options_watch_identity_key_cert_pairs(options);
#endif
    grpc_tls_certificate_provider_release(provider);
}

/* Credentials that take any certificate. gRPC has this only in a newer interface than the one for all else. */
static grpc_channel_credentials *create_unverified(const struct tl_call_tls *tls)
{
    grpc_tls_credentials_options *options = grpc_tls_credentials_options_create();
    grpc_tls_certificate_verifier *verifier = grpc_tls_certificate_verifier_no_op_create();
    grpc_tls_credentials_options_set_certificate_verifier(options, verifier);
    grpc_tls_certificate_verifier_release(verifier);
    grpc_tls_credentials_options_set_verify_server_cert(options, 0);
    grpc_tls_credentials_options_set_check_call_host(options, 0);
    if (tls->cert_chain != NULL) set_identity(options, tls);
    return grpc_tls_credentials_create(options);
}

static grpc_channel_credentials *create_credentials(const struct tl_call_tls *tls)
{
    if (tls == NULL) return grpc_insecure_credentials_create();
    if (tls->is_unverified) return create_unverified(tls);
    grpc_ssl_pem_key_cert_pair pair = {.private_key = tls->private_key, .cert_chain = tls->cert_chain};
    return grpc_ssl_credentials_create(tls->root_certs, tls->cert_chain != NULL ? &pair : NULL, NULL, NULL);
}

/* fd -1: gRPC dials the address. */
static grpc_channel *create_channel(const char *address, int fd, const struct tl_channel_options *options)
{
    grpc_arg user_agent = {.type = GRPC_ARG_STRING, .key = (char *)GRPC_ARG_PRIMARY_USER_AGENT_STRING};
    user_agent.value.string = (char *)(options->user_agent != NULL ? options->user_agent : "tensorlane/" TL_VERSION);
    grpc_arg authority = {.type = GRPC_ARG_STRING, .key = (char *)GRPC_ARG_DEFAULT_AUTHORITY};
    authority.value.string = (char *)options->authority;
    /* gRPC unpacks a compressed message before it looks at its size: a small one could take all memory. */
    int algorithms = 1 << GRPC_COMPRESS_NONE | (options->is_gzip ? 1 << GRPC_COMPRESS_GZIP : 0);
    grpc_arg args[] = {
        user_agent,
        integer_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)options->max_message_bytes),
        integer_arg(GRPC_ARG_KEEPALIVE_TIME_MS, tl_clock_to_ms(options->keepalive_ns)),
        integer_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, tl_clock_to_ms(options->keepalive_timeout_ns)),
        integer_arg(TL_ARG_PING_TIMEOUT_MS, tl_clock_to_ms(options->keepalive_timeout_ns)),
        integer_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0),
        integer_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0),
        integer_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1),
        integer_arg(GRPC_ARG_ENABLE_RETRIES, 0),
        integer_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0),
        integer_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1),
        integer_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, tl_clock_to_ms(options->connect_timeout_ns)),
        integer_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100),
        integer_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000),
        integer_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, TL_HTTP2_FRAME_BYTES),
        integer_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, algorithms),
        integer_arg(GRPC_COMPRESSION_CHANNEL_DEFAULT_ALGORITHM,
                    options->is_gzip ? GRPC_COMPRESS_GZIP : GRPC_COMPRESS_NONE),
        integer_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, options->is_gzip),
        authority, /* the last, so that it can be left out */
    };
    size_t arg_count = TL_ARRAY_COUNT(args) - (options->authority == NULL ? 1 : 0);
    grpc_channel_args channel_args = {.num_args = arg_count, .args = args};
    grpc_channel_credentials *credentials = create_credentials(options->tls);
    grpc_channel *channel = fd >= 0 ? grpc_channel_create_from_fd(address, fd, credentials, &channel_args)
                                    : grpc_channel_create(address, credentials, &channel_args);
    grpc_channel_credentials_release(credentials);
    return channel;
}

grpc_channel *tl_channel_create(const char *address, const struct tl_channel_options *options)
{
    return create_channel(address, -1, options);
}

grpc_channel *tl_channel_create_from_fd(int fd, const char *target, const struct tl_channel_options *options)
{
    return create_channel(target, fd, options);
}
