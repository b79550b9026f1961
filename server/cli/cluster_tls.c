// SPDX-License-Identifier: Apache-2.0
#include "server/cli/cluster_tls.h"

#include "server/tls_options.h"

static struct tl_tls *opened;

enum tl_status tl_cluster_tls_open(const struct tl_settings *settings, struct tl_error *ret_error)
{
    struct tl_tls_options options;
    if (opened || !tl_tls_options_of(settings, &options)) return TL_OK;
    return tl_tls_create(&options, &opened, ret_error);
}

struct tl_tls *tl_cluster_tls(void)
{
    return opened;
}

void tl_cluster_tls_end(void)
{
    if (opened) tl_tls_end(opened);
    tl_tls_release(opened);
    opened = NULL;
}
