// SPDX-License-Identifier: Apache-2.0
/*
 * Which devices a card reaches itself: each is probed when it is first wanted, by a thread that may block, and the
 * result is kept.
 *
 * Thread: any, unless a function says otherwise.
 */
#ifndef DATAPLANE_MEMORY_DEVICE_ACCESS_H
#define DATAPLANE_MEMORY_DEVICE_ACCESS_H

#include <tensorlane/tensor.h>

#include "base/closure_thread.h"
#include "dataplane/provider.h"

struct tl_device_accesses {
    struct tl_provider *provider;
    struct tl_closure_thread *thread; /* carries the probes out */
    pthread_mutex_t mutex;            /* guards first, and the results */
    struct tl_device_access *first;   /* NULL: no device was wanted yet */
};

void tl_device_accesses_init(struct tl_device_accesses *accesses, struct tl_provider *provider,
                             struct tl_closure_thread *thread);
/* The thread has stopped. */
void tl_device_accesses_fini(struct tl_device_accesses *accesses);

/* Says why the card does not reach memory of the device under these keys, to read it or to write it; NULL: it does.
 * While the probe runs, that is the reason. Never freed (base/reason.h). */
const char *tl_device_accesses_why_not(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys,
                                       enum tl_region_access region_access);

/* The same without a probe: returns false where none was made yet. */
bool tl_device_accesses_look(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys,
                             enum tl_region_access region_access, const char **ret_why_not);

/* Whether the closure is a probe that was posted to the thread. */
bool tl_device_accesses_owns(const struct tl_closure *closure);

#endif
