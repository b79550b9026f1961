// SPDX-License-Identifier: Apache-2.0
/*
 * The tasks that a launcher has started: on which hosts, in which order, at which ports.
 *
 * Happy path: tl_launch_add for each host, or one of the readers of what launchers say (a node list of Slurm, a host
 * file); then tl_launch_place gives each task, in the order in which the launcher counts them, its host and its place
 * there. Failure modes: those of the texts; more than TL_LAUNCH_MAX_TASKS tasks.
 */
#ifndef CONFIG_LAUNCH_H
#define CONFIG_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <tensorlane/status.h>

#include "config/address.h"

#define HASH_NONFATAL_OOM 1
#include <uthash.h>

#define TL_LAUNCH_MAX_TASKS 65536u
/* Holds every name of a host, with its NUL. */
#define TL_LAUNCH_HOST_BYTES 256

struct tl_launch_host {
    char name[TL_LAUNCH_HOST_BYTES];
    char key[TL_ADDRESS_BYTES]; /* private: its one spelling */
    uint32_t task_count;
    uint32_t group;    /* component of a heterogeneous job */
    bool is_known;     /* private: it is in the table */
    UT_hash_handle hh; /* hh.next: the host that was added after this one */
};

/* Zeroed memory has no hosts. */
struct tl_launch {
    struct tl_launch_host *hosts; /* in the order in which they were added; NULL: none */
    size_t host_count;
    uint32_t task_count; /* all hosts have so many */
    uint32_t group;      /* hosts that are added belong to it */
};

/* A task: the host, and how many earlier tasks that has. */
struct tl_launch_task {
    const struct tl_launch_host *host;
    uint32_t place;
};

void tl_launch_fini(struct tl_launch *launch);

/* Adds tasks to a host, which may be there already. Errors: TL_INVALID_ARGUMENT: the name is that of no host; the host
 * has another spelling or is of another group; too many tasks. TL_RESOURCE_EXHAUSTED: no memory. */
enum tl_status tl_launch_add(struct tl_launch *launch, const char *name, size_t name_bytes, uint32_t task_count,
                             struct tl_error *ret_error) TL_MUST_USE;

/* Returns the host with this name, in whatever spelling; NULL: there is none. */
const struct tl_launch_host *tl_launch_find(const struct tl_launch *launch, const char *name);

/* Adds the hosts of a node list of Slurm, such as "node[001-004,007],gpu-[1-2]-x". tasks_per_node: how many tasks
 * each host has, such as "2(x3),1", which is 2, 2, 2 and 1; NULL: each has per_host.
 * Errors: TL_INVALID_ARGUMENT: one of the texts cannot be read, or they speak of different numbers of hosts. The
 * message begins with the text that is wrong. Those of tl_launch_add. */
enum tl_status tl_launch_add_slurm(struct tl_launch *launch, const char *node_list, const char *tasks_per_node,
                                   uint32_t per_host, struct tl_error *ret_error) TL_MUST_USE;

/* Adds the hosts of a host file. A line is "HOST", "HOST:N" or "HOST slots=N", and each adds N tasks (1) to its host; #
 * begins a comment. The text is changed. per_host: each host has so many tasks, whatever the file says; 0: what it
 * says. Errors: TL_INVALID_ARGUMENT: a line, by its number. Those of tl_launch_add. */
enum tl_status tl_launch_add_hostfile(struct tl_launch *launch, char *text, uint32_t per_host,
                                      struct tl_error *ret_error) TL_MUST_USE;

/* The order of the tasks of several hosts: so many of one host, then of the next one, and so on in turns. */
#define TL_LAUNCH_BLOCK UINT32_MAX /* all of the first host first */
#define TL_LAUNCH_CYCLIC 1u        /* one of each */

/* Writes all tasks, group after group. ret_tasks has room for launch->task_count. */
void tl_launch_place(const struct tl_launch *launch, uint32_t run, struct tl_launch_task *ret_tasks);

/* Writes the host of a task of Kubernetes: the pattern with {job}, {index} and {group} replaced. With group_size above
 * 0, group is task / group_size and index the rest. Errors: TL_INVALID_ARGUMENT: another word in braces, or the name is
 * too long. */
enum tl_status tl_launch_expand(const char *pattern, const char *job, uint32_t task, uint32_t group_size,
                                char ret_host[TL_LAUNCH_HOST_BYTES], struct tl_error *ret_error) TL_MUST_USE;

#endif
