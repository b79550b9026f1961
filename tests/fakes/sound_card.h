// SPDX-License-Identifier: Apache-2.0
/* A card with which nothing is wrong, as `devices` and `doctor` find it. */
#ifndef TESTS_FAKES_SOUND_CARD_H
#define TESTS_FAKES_SOUND_CARD_H

#include "dataplane/verbs/verbs.h"

/* Initial values of a candidate. The test adds the reason, the MTU and the speed. */
#define SOUND_CARD                                                                                                     \
    .order = 0, .device = "mlx5_0", .port = 1, .gid_index = 3, .gid = "10.0.0.1", .gid_type = "RoCE v2",               \
    .interface = "eth0", .state = "active", .link_layer = "Ethernet", .max_mtu_bytes = 4096, .numa_node = 1,           \
    .has_windows = true

#endif
