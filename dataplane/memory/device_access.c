// SPDX-License-Identifier: Apache-2.0
/*
 * The probes of devices. Failure modes: a probe that fails is logged with its reason, and is not made again: the card,
 * the driver and the device stay what they are while the process lives.
 */
#include "dataplane/memory/device_access.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/reason.h"
#include "dataplane/probe.h"
#include "tensor/device.h"

#define PROBE_NS TL_NS_PER_SEC

static const char reason_trying[] = "the card tries for the first time whether it reaches the memory of the device";
static const char reason_no_thread[] = "there is no thread or memory to try whether the card reaches the device";

struct tl_device_access {
    struct tl_closure job;
    struct tl_device_accesses *accesses;
    struct tl_device_access *next;
    struct tl_device device;
    enum tl_keys keys;
    const char *why_not[2]; /* by enum tl_region_access; NULL: the card reaches it */
};

void tl_device_accesses_init(struct tl_device_accesses *accesses, struct tl_provider *provider,
                             struct tl_closure_thread *thread)
{
    *accesses = (struct tl_device_accesses){.provider = provider, .thread = thread};
    TL_CHECK(pthread_mutex_init(&accesses->mutex, NULL) == 0);
}

void tl_device_accesses_fini(struct tl_device_accesses *accesses)
{
    struct tl_device_access *next;
    for (struct tl_device_access *access = accesses->first; access != NULL; access = next) {
        next = access->next;
        free(access);
    }
    pthread_mutex_destroy(&accesses->mutex);
}

static void log_result(const struct tl_device_access *access, enum tl_status reached, enum tl_status ordered,
                       const struct tl_error *error)
{
    const char *card = access->accesses->provider->name;
    char name[TL_DEVICE_TEXT_BYTES];
    tl_device_format(access->device, name);
    if (reached != TL_OK) {
        TL_LOG_AT_WARN("the card does not reach the memory of a device, whose tensors are copied",
                       TL_STR("device", card), TL_STR("gpu", name), TL_STR("reason", error->message));
    } else if (ordered != TL_OK) {
        TL_LOG_AT_WARN("the card reads the memory of a device itself, and what is received there is copied",
                       TL_STR("device", card), TL_STR("gpu", name), TL_STR("reason", error->message));
    } else {
        TL_LOG_AT_INFO("the card reaches the memory of a device itself", TL_STR("device", card), TL_STR("gpu", name));
    }
}

static void run_probe(struct tl_closure *job)
{
    struct tl_device_access *access = TL_CONTAINER_OF(job, struct tl_device_access, job);
    struct tl_device_accesses *accesses = access->accesses;
    struct tl_error error = {.code = TL_OK};
    enum tl_status reached =
        tl_provider_probe_device(accesses->provider, access->keys, access->device, PROBE_NS, &error);
    enum tl_status ordered = reached == TL_OK ? tl_device_check_write_order(access->device, &error) : reached;
    const char *why_not = ordered != TL_OK ? tl_reason(error.message) : NULL;
    pthread_mutex_lock(&accesses->mutex);
    access->why_not[TL_REGION_READ] = reached != TL_OK ? why_not : NULL;
    access->why_not[TL_REGION_WRITE] = why_not;
    pthread_mutex_unlock(&accesses->mutex);
    log_result(access, reached, ordered, &error);
}

bool tl_device_accesses_owns(const struct tl_closure *closure)
{
    return closure->run == run_probe;
}

static struct tl_device_access *find(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys)
{
    struct tl_device_access *access = accesses->first;
    while (access != NULL &&
           (access->device.kind != device.kind || access->device.index != device.index || access->keys != keys))
        access = access->next;
    return access;
}

/* Makes an entry whose probe is to be posted. NULL: no memory or thread. */
static struct tl_device_access *add(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys)
{
    struct tl_error error;
    if (tl_closure_thread_start(accesses->thread, &error) != TL_OK) return NULL;
    struct tl_device_access *access = calloc(1, sizeof(*access));
    if (access == NULL) return NULL;
    *access = (struct tl_device_access){.job.run = run_probe,
                                        .accesses = accesses,
                                        .next = accesses->first,
                                        .device = device,
                                        .keys = keys,
                                        .why_not = {reason_trying, reason_trying}};
    tl_list_init(&access->job.link);
    accesses->first = access;
    return access;
}

const char *tl_device_accesses_why_not(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys,
                                       enum tl_region_access region_access)
{
    struct tl_device_access *added = NULL;
    if (accesses->provider->ops->region_create_on == NULL) return "the transport reaches no memory of devices";
    pthread_mutex_lock(&accesses->mutex);
    struct tl_device_access *access = find(accesses, device, keys);
    if (access == NULL) access = added = add(accesses, device, keys);
    const char *why_not = access != NULL ? access->why_not[region_access] : reason_no_thread;
    pthread_mutex_unlock(&accesses->mutex);
    if (added != NULL) tl_closure_thread_post(accesses->thread, &added->job);
    return why_not;
}

bool tl_device_accesses_look(struct tl_device_accesses *accesses, struct tl_device device, enum tl_keys keys,
                             enum tl_region_access region_access, const char **ret_why_not)
{
    pthread_mutex_lock(&accesses->mutex);
    const struct tl_device_access *access = find(accesses, device, keys);
    const char *why_not = access != NULL ? access->why_not[region_access] : reason_trying;
    pthread_mutex_unlock(&accesses->mutex);
    if (why_not == reason_trying) return false;
    *ret_why_not = why_not;
    return true;
}
