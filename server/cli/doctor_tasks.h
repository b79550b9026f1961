// SPDX-License-Identifier: Apache-2.0
/* The tasks of a cluster as `tensorlane doctor` sees them from this machine: their hosts, resolved once. */
#ifndef SERVER_CLI_DOCTOR_TASKS_H
#define SERVER_CLI_DOCTOR_TASKS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/ip.h"
#include "config/config.h"
#include "server/cli/doctor.h"

#define TL_DOCTOR_MAX_IPS 16

struct tl_doctor_host {
    char name[256];
    struct tl_ip ips[TL_DOCTOR_MAX_IPS];
    size_t ip_count;
    struct tl_error error; /* code TL_OK: it was resolved */
    bool is_here;          /* it is this machine */
    bool has_listen;       /* all its tasks have "listen" */
    unsigned port;         /* where its first task listens */
};

struct tl_doctor_task {
    const struct tl_config_task *task;
    const struct tl_doctor_host *host; /* NULL: it has no address */
    unsigned dialled_port;
    unsigned port; /* at which it listens */
};

struct tl_doctor_tasks {
    const struct tl_config *config;
    struct tl_doctor_host *hosts; /* [host_count] */
    size_t host_count;
    struct tl_doctor_task *tasks; /* [config->task_count] */
};

/* Resolves the hosts of all tasks. The configuration must stay valid. Ownership: tl_doctor_tasks_fini. False: no
 * memory. Blocks: for the name resolution, at most 10 s for each 65 hosts. */
bool tl_doctor_tasks_init(struct tl_doctor_tasks *tasks, const struct tl_config *config);
void tl_doctor_tasks_fini(struct tl_doctor_tasks *tasks); /* zeroed ones are accepted */

/* Whether the task's host is this machine. */
bool tl_doctor_task_is_here(const struct tl_doctor_task *task);

/* What the tasks of this machine need together. */
void tl_doctor_tasks_needs(const struct tl_doctor_tasks *tasks, struct tl_doctor_needs *ret_needs);

/* The network of this machine: interfaces, the own name, and with tasks (NULL: none) their hosts, routes and sockets.
 */
void tl_doctor_check_network(struct tl_doctor_report *report, const struct tl_doctor_roots *roots,
                             const struct tl_doctor_tasks *tasks);

#endif
