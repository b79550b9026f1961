// SPDX-License-Identifier: Apache-2.0
/*
 * Workers whose address takes connections but does not answer: what is the matter, by evidence.
 *
 * The process that listens is looked up where it is one of this machine: stopped, out of descriptors, another program.
 * Otherwise the other workers are asked what they know: one that they have identified there is stopped, overloaded or
 * out of descriptors, and no other program, whichever process forwards its port here. Only an address at which no
 * worker has been seen, and that does not speak HTTP/2, may belong to another program.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/text.h"
#include "server/cli/health.h"
#include "server/cli/local_process.h"

/* A worker that knows the silent one. */
struct witness {
    const struct tl_config_task *task;
    const struct tl_peer_description *peer; /* NULL: none does */
};

static struct witness find_witness(const struct tl_health_finding *findings, size_t count,
                                   const struct tl_health_finding *silent)
{
    struct witness witness = {0};
    for (size_t i = 0; i < count; i++) {
        const struct tl_description *description = &findings[i].description;
        for (size_t j = 0; &findings[i] != silent && j < description->peer_count; j++) {
            const struct tl_peer_description *peer = &description->peers[j];
            if (peer->incarnation == 0 || strcmp(peer->name, silent->task->name) != 0) continue;
            witness = (struct witness){.task = findings[i].task, .peer = peer};
            if (strcmp(peer->state, "up") == 0) return witness;
        }
    }
    return witness;
}

/* ----------------------------------------------------------------------------------------------- another machine -- */

static void explain_by_witness(struct tl_health_finding *finding, const struct witness *witness)
{
    const struct tl_peer_description *peer = witness->peer;
    const char *name = finding->task->name, *address = finding->task->address;
    char place[384] = "", ps[64] = "ps";
    if (peer->process_id != 0) {
        snprintf(place, sizeof(place), " (process %" PRIu64 "%s%.255s)", peer->process_id,
                 peer->host_name[0] != '\0' ? " on " : "", peer->host_name);
        snprintf(ps, sizeof(ps), "ps -o stat= -p %" PRIu64, peer->process_id);
    }
    snprintf(finding->reason, sizeof(finding->reason),
             "%s takes connections but does not answer from here; %s has identified it as %s%s: it is stopped, out of "
             "descriptors or overloaded, or large packets are lost on the way",
             address, witness->task->name, name, place);
    snprintf(finding->remedy, sizeof(finding->remedy),
             "look at it there: \"%s\" shows T for a stopped process, which kill -CONT lets go on; else see its log, "
             "its load and its descriptors (ls /proc/PID/fd)",
             ps);
}

/* -------------------------------------------------------------------------------------------------- this machine -- */

static bool is_worker(const struct tl_local_process *process, const struct witness *witness)
{
    return process->is_worker || (witness->peer != NULL && witness->peer->process_id == (uint64_t)process->pid);
}

/* The process is one that this user may look into. */
static void explain_process(struct tl_health_finding *finding, const struct tl_local_process *process,
                            const struct witness *witness)
{
    const char *address = finding->task->address;
    char reason[TL_ERROR_MESSAGE_BYTES], remedy[TL_ERROR_MESSAGE_BYTES];
    snprintf(reason, sizeof(reason), "process %d (%s) takes the connections at %s but does not answer", process->pid,
             process->name, address);
    if (tl_local_process_trouble(process, address, reason, remedy)) {
        /* The process says it all. */
    } else if (is_worker(process, witness)) {
        snprintf(remedy, sizeof(remedy),
                 process->state == 'D' ? "it waits for a disk, a network file system or a device: see dmesg"
                                       : "it is overloaded or hangs: see its log and its load; stop and start it");
    } else if (witness->peer != NULL) {
        explain_by_witness(finding, witness);
        size_t len = strlen(finding->reason);
        snprintf(finding->reason + len, sizeof(finding->reason) - len,
                 "; process %d (%s) takes the connections here and forwards them", process->pid, process->name);
        return;
    } else if (finding->has_http2) {
        snprintf(remedy, sizeof(remedy), "it hangs, or forwards the port to a worker that does: see the logs of both");
    } else {
        snprintf(reason, sizeof(reason), "another program listens at %s: process %d (%s)", address, process->pid,
                 process->name);
        snprintf(remedy, sizeof(remedy),
                 "stop it, or give this task another port; if it forwards the port, look at the worker there");
    }
    snprintf(finding->reason, sizeof(finding->reason), "%s", reason);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s", remedy);
}

static void explain_foreign_user(struct tl_health_finding *finding, const struct tl_local_process *process)
{
    size_t len = strlen(finding->remedy);
    snprintf(finding->remedy + len, sizeof(finding->remedy) - len,
             "; the process belongs to user %" PRIu32 ": run health as that user or as root to see more",
             process->user);
}

void tl_health_explain_silent(const struct tl_health_finding *findings, size_t count, struct tl_health_finding *silent)
{
    const struct witness witness = find_witness(findings, count, silent);
    struct tl_local_process process;
    bool is_seen = silent->is_local && tl_local_process_listening(silent->task->address, &process);
    if (is_seen && process.pid != 0) {
        explain_process(silent, &process, &witness);
    } else if (witness.peer != NULL) {
        explain_by_witness(silent, &witness);
    } else if (is_seen) {
        explain_foreign_user(silent, &process);
    }
}
