// SPDX-License-Identifier: Apache-2.0
/*
 * The tasks of a cluster as seen from this machine, and the checks of the network for each of them.
 *
 * Happy path: every host name is resolved once, many at the same time, each with a deadline of its own; a host with an
 * address of this machine is this machine. Failure mode: a name that cannot be resolved, or not in time, keeps its
 * error, which becomes a line.
 */
#include "server/cli/doctor_tasks.h"

#include <ifaddrs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/clock.h"
#include "control/endpoint.h"
#include "server/cli/doctor_net.h"
#include "server/cli/threads.h"
#include "server/cli/local_host.h"
#include "server/cli/local_process.h"
#include "server/transports/local_settings.h"
#include "server/transports/verbs_settings.h"

#define RESOLVE_NS (10 * TL_NS_PER_SEC)

/* ------------------------------------------------------------------------------------------------------- hosts -- */

static bool has_ip(const struct tl_doctor_host *host, const struct tl_ip *ip)
{
    for (size_t i = 0; i < host->ip_count; i++)
        if (tl_ip_is_equal(&host->ips[i], ip)) return true;
    return false;
}

static void take_found(struct tl_doctor_host *host, const struct addrinfo *found)
{
    struct tl_ip ip;
    for (const struct addrinfo *item = found; item; item = item->ai_next) {
        if (host->ip_count == TL_DOCTOR_MAX_IPS || !tl_ip_of_sockaddr(item->ai_addr, &ip) || has_ip(host, &ip))
            continue;
        host->ips[host->ip_count++] = ip;
        host->is_here = host->is_here || tl_ip_is_here(&ip);
    }
}

static void resolve(struct tl_doctor_host *host)
{
    const int64_t deadline_ns = tl_clock_deadline_ns(RESOLVE_NS);
    struct tl_endpoint endpoint = {.port = "0"};
    struct addrinfo *found;
    snprintf(endpoint.host, sizeof(endpoint.host), "%s", host->name);
    host->error.code = tl_endpoint_resolve(&endpoint, deadline_ns, &found, &host->error);
    if (host->error.code == TL_OK) {
        take_found(host, found);
        freeaddrinfo(found);
    } else {
        host->is_here = tl_local_host_is_own_name(host->name);
    }
}

static void resolve_at(void *context, size_t place)
{
    struct tl_doctor_tasks *tasks = context;
    resolve(&tasks->hosts[place]);
}

/* Returns the host with this name, a new one where there is none yet. */
static struct tl_doctor_host *find_host(struct tl_doctor_tasks *tasks, const char *name)
{
    for (size_t i = 0; i < tasks->host_count; i++)
        if (strcmp(tasks->hosts[i].name, name) == 0) return &tasks->hosts[i];
    struct tl_doctor_host *host = &tasks->hosts[tasks->host_count++];
    *host = (struct tl_doctor_host){.has_listen = true};
    snprintf(host->name, sizeof(host->name), "%s", name);
    return host;
}

static void add_task(struct tl_doctor_tasks *tasks, size_t place)
{
    const struct tl_config_task *task = &tasks->config->tasks[place];
    char name[256];
    uint16_t port;
    tasks->tasks[place].task = task;
    if (!task->address || tl_address_split(task->address, name, sizeof(name), &port, NULL) != TL_OK) return;
    struct tl_doctor_host *host = find_host(tasks, name);
    if (host->port == 0) host->port = port;
    tasks->tasks[place].dialled_port = port;
    if (!task->settings.listen) host->has_listen = false;
    tasks->tasks[place].host = host;
    tasks->tasks[place].port = port;
    if (task->settings.listen && tl_address_split(task->settings.listen, name, sizeof(name), &port, NULL) == TL_OK)
        tasks->tasks[place].port = port;
}

bool tl_doctor_tasks_init(struct tl_doctor_tasks *tasks, const struct tl_config *config)
{
    *tasks = (struct tl_doctor_tasks){.config = config};
    tasks->hosts = calloc(config->task_count + 1, sizeof(*tasks->hosts));
    tasks->tasks = calloc(config->task_count + 1, sizeof(*tasks->tasks));
    if (!tasks->hosts || !tasks->tasks) {
        tl_doctor_tasks_fini(tasks);
        return false;
    }
    for (size_t i = 0; i < config->task_count; i++)
        add_task(tasks, i);
    tl_run_all(tasks->host_count, resolve_at, tasks);
    return true;
}

void tl_doctor_tasks_fini(struct tl_doctor_tasks *tasks)
{
    free(tasks->hosts);
    free(tasks->tasks);
    *tasks = (struct tl_doctor_tasks){.config = NULL};
}

bool tl_doctor_task_is_here(const struct tl_doctor_task *task)
{
    return task->host && task->host->is_here;
}

/* ------------------------------------------------------------------------------------------------------- needs -- */

void tl_doctor_tasks_needs(const struct tl_doctor_tasks *tasks, struct tl_doctor_needs *ret_needs)
{
    struct tl_doctor_needs needs = {.is_rdma_refused = true, .peer_count = tasks->config->task_count - 1};
    for (size_t i = 0; i < tasks->config->task_count; i++) {
        const struct tl_settings *settings = &tasks->tasks[i].task->settings;
        if (!tl_doctor_task_is_here(&tasks->tasks[i])) continue;
        needs.connections = tl_max_u64(needs.connections, settings->connections);
        if (tl_verbs_settings_refusal(settings)) continue;
        needs.is_rdma_refused = false;
        needs.pool_bytes = tl_max_u64(needs.pool_bytes, settings->verbs.pool_bytes);
        if (settings->verbs.queue_depth > needs.queue_depth) needs.queue_depth = (uint32_t)settings->verbs.queue_depth;
        /* Shared memory is enough for a worker to start. */
        if (settings->rdma == TL_RDMA_REQUIRE && tl_local_settings_refusal(settings)) needs.is_rdma_required = true;
    }
    /* On a machine without tasks, such as an operator's, nothing needs descriptors for peers. */
    if (needs.connections == 0) needs.peer_count = 0;
    *ret_needs = needs;
}

/* ----------------------------------------------------------------------------------------------------- network -- */

static struct tl_doctor_name name_of(const struct tl_doctor_host *host, enum tl_doctor_name_use use)
{
    return (struct tl_doctor_name){
        .host = host->name,
        .ips = host->ips,
        .ip_count = host->ip_count,
        .failure = host->error.code != TL_OK ? host->error.message : NULL,
        .use = use,
        .has_listen = host->has_listen,
        .port = host->port,
    };
}

static enum tl_doctor_name_use use_of(const struct tl_doctor_tasks *tasks)
{
    for (size_t i = 0; i < tasks->host_count; i++)
        if (!tasks->hosts[i].is_here) return TL_DOCTOR_NAME_SHARED;
    return TL_DOCTOR_NAME_WITHIN;
}

static void check_own_name(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                           const struct tl_doctor_tasks *tasks)
{
    struct tl_doctor_host own = {.is_here = true};
    if (gethostname(own.name, sizeof(own.name)) != 0) return;
    own.name[sizeof(own.name) - 1] = '\0';
    for (size_t i = 0; tasks && i < tasks->host_count; i++)
        if (strcmp(tasks->hosts[i].name, own.name) == 0) return;
    resolve(&own);
    const struct tl_doctor_name name = name_of(&own, TL_DOCTOR_NAME_OWN);
    tl_doctor_check_name(report, roots, &name);
}

/* The routes to all addresses of a host; those of link-local addresses depend on their zone. */
static void check_routes(struct tl_doctor_report *report, const struct tl_doctor_host *host)
{
    struct tl_doctor_route routes[TL_DOCTOR_MAX_IPS];
    size_t count = 0, failed_count = 0;
    for (size_t i = 0; i < host->ip_count; i++) {
        if (tl_ip_is_link_local(&host->ips[i])) continue;
        tl_doctor_find_route(host->name, &host->ips[i], &routes[count]);
        failed_count += routes[count].failure != NULL;
        count++;
    }
    for (size_t i = 0; i < count; i++) {
        routes[i].has_other = failed_count < count;
        tl_doctor_check_route(report, &routes[i]);
    }
}

static void check_socket(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                         const struct tl_doctor_tasks *tasks, const struct tl_doctor_task *task)
{
    struct tl_local_process process;
    char start[512];
    const struct tl_doctor_name name = name_of(task->host, use_of(tasks));
    snprintf(start, sizeof(start), "tensorlane serve --config %s --job %s --task %" PRIu32, tasks->config->source,
             task->task->job, task->task->index);
    const char *listen = task->task->settings.listen ? task->task->settings.listen : task->task->address;
    bool has_process = tl_local_process_listening(listen, &process);
    const struct tl_doctor_socket socket = {.task = task->task->name,
                                            .name = &name,
                                            .port = task->port,
                                            .process = has_process ? &process : NULL,
                                            .start = start};
    tl_doctor_check_socket(report, roots, &socket);
}

void tl_doctor_check_network(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                             const struct tl_doctor_tasks *tasks)
{
    struct ifaddrs *interfaces;
    if (getifaddrs(&interfaces) == 0) {
        tl_doctor_check_interfaces(report, roots, interfaces);
        freeifaddrs(interfaces);
    }
    check_own_name(report, roots, tasks);
    if (!tasks) return;
    for (size_t i = 0; i < tasks->host_count; i++) {
        const struct tl_doctor_name name = name_of(&tasks->hosts[i], use_of(tasks));
        tl_doctor_check_name(report, roots, &name);
        if (!tasks->hosts[i].is_here) check_routes(report, &tasks->hosts[i]);
    }
    for (size_t i = 0; i < tasks->config->task_count; i++)
        if (tl_doctor_task_is_here(&tasks->tasks[i])) check_socket(report, roots, tasks, &tasks->tasks[i]);
}
