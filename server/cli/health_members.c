// SPDX-License-Identifier: Apache-2.0
/*
 * Workers that were started with different cluster.json files, and tasks that two processes claim.
 *
 * Each worker tells the tasks that it knows, itself among them. It is a fault when one worker knows another one that
 * does not know it: no request can travel one of the two ways. Where the former is connected to the latter all the
 * same, the other way may be the one that nothing needs, and both rows have a note only. Two workers that do not know
 * each other are none: each process of TensorFlow may be given only the part of the cluster that it needs. Other
 * addresses are none either, since ports are forwarded.
 *
 * Every worker tells the incarnation of the processes that it is connected to. Where two workers are connected to
 * different processes of one task, a restart may have come between the two answers. So all workers that tell of such a
 * task are asked again, at the same time, before two processes are reported; what one has said that does not answer
 * again does not count.
 */
#include "server/cli/health_members.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "server/cli/remedy.h"
#include "server/peers/rivals.h"

/* Names in one list of a message. */
#define MAX_NAMES 4

const struct tl_peer_description *tl_health_find_member(const struct tl_description *description, const char *name,
                                                        size_t hint)
{
    if (hint < description->peer_count && strcmp(description->peers[hint].name, name) == 0)
        return &description->peers[hint];
    for (size_t i = 0; i < description->peer_count; i++)
        if (strcmp(description->peers[i].name, name) == 0) return &description->peers[i];
    return NULL;
}

bool tl_health_is_identified(const struct tl_health_finding *finding)
{
    return finding->has_description && finding->verified >= TL_HEALTH_STAGE_IDENTITY;
}

void tl_health_set_fault(struct tl_health_finding *finding, enum tl_health_stage stage, const char *reason,
                         const char *remedy)
{
    finding->is_healthy = false;
    finding->stage = stage;
    snprintf(finding->reason, sizeof(finding->reason), "%s", reason);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s", remedy);
}

bool tl_health_tells_members(const struct tl_health_finding *finding)
{
    return tl_health_is_identified(finding) &&
           tl_health_find_member(&finding->description, finding->task->name, 0) != NULL;
}

/* --------------------------------------------------------------------------------------------- another cluster -- */

/* The job in a name "/job:ps/task:0", with its length. */
static const char *job_of(const char *name, size_t *ret_len)
{
    const char *job = strncmp(name, "/job:", 5) == 0 ? name + 5 : name;
    *ret_len = strcspn(job, "/");
    return job;
}

static bool has_job(const struct tl_description *description, const char *name)
{
    size_t len, other_len;
    const char *job = job_of(name, &len);
    for (size_t i = 0; i < description->peer_count; i++) {
        const char *other = job_of(description->peers[i].name, &other_len);
        if (len == other_len && memcmp(job, other, len) == 0) return true;
    }
    return false;
}

/* Writes the tasks that `with` has and `without` lacks, a job by its name where it lacks the whole job. Returns how
 * many there are. */
static size_t list_lacking(const struct tl_description *with, const struct tl_description *without, char *ret_text,
                           size_t capacity)
{
    size_t count = 0, used = 0, len = 0;
    const char *former_job = NULL;
    ret_text[0] = '\0';
    for (size_t i = 0; i < with->peer_count; i++) {
        const char *name = with->peers[i].name;
        if (tl_health_find_member(without, name, i)) continue;
        bool is_job = !has_job(without, name);
        const char *job = job_of(name, &len);
        if (is_job && former_job && strncmp(former_job, job, len + 1) == 0) continue;
        former_job = is_job ? job : NULL;
        if (count++ < MAX_NAMES && used < capacity)
            used += (size_t)snprintf(ret_text + used, capacity - used, "%s%.*s", count > 1 ? ", " : "",
                                     is_job ? (int)len : 128, is_job ? job : name);
    }
    if (count > MAX_NAMES && used < capacity)
        snprintf(ret_text + used, capacity - used, " and %zu more", count - MAX_NAMES);
    return count;
}

static void set_note(struct tl_health_finding *finding, const char *reason, const char *remedy)
{
    if (finding->reason[0] != '\0') return;
    snprintf(finding->reason, sizeof(finding->reason), "%s", reason);
    snprintf(finding->remedy, sizeof(finding->remedy), "%s", remedy);
}

/* `lacks` has a part of the cluster that `knows` has, without the job of that. This is right for one that only answers,
 * such as a parameter server. TensorFlow keeps evaluators out of the files of all others. */
static void note_part(const struct tl_health_finding *knows, struct tl_health_finding *lacks, const char *lacking)
{
    char reason[TL_ERROR_MESSAGE_BYTES];
    if (strncmp(knows->task->name, "/job:evaluator/", strlen("/job:evaluator/")) == 0) return;
    snprintf(reason, sizeof(reason), "its cluster.json lacks %s, that of %s does not", lacking, knows->task->name);
    set_note(
        lacks, reason,
        "none, if it only answers these workers; otherwise give all workers the same file, and start this one anew "
        "with it");
}

/* `knows` has `lacks` in its cluster.json, as `peer`, and not the other way round. */
static void set_other_cluster(struct tl_health_finding *knows, const struct tl_peer_description *peer,
                              struct tl_health_finding *lacks)
{
    bool is_connected = strcmp(peer->state, "up") == 0;
    const char *remedy = "give all workers the same file, and start this one anew with it";
    char has[400], lacking[400], reason[TL_ERROR_MESSAGE_BYTES];
    size_t has_count = list_lacking(&lacks->description, &knows->description, has, sizeof(has));
    list_lacking(&knows->description, &lacks->description, lacking, sizeof(lacking));
    if (has_count == 0 && !has_job(&lacks->description, knows->task->name)) {
        note_part(knows, lacks, lacking);
        return;
    }
    snprintf(reason, sizeof(reason), "it runs with another cluster.json than %s: it %s%s%slacks %s", knows->task->name,
             has_count > 0 ? "has " : "", has, has_count > 0 ? ", " : "", lacking);
    if (is_connected) {
        set_note(lacks, reason, remedy);
    } else if (lacks->is_healthy) {
        tl_health_set_fault(lacks, TL_HEALTH_STAGE_CONFIG, reason, remedy);
    }
    remedy = "give all workers the same file, and start those anew that have another one";
    snprintf(reason, sizeof(reason), "%s runs with another cluster.json, which lacks this worker", lacks->task->name);
    if (is_connected) {
        set_note(knows, reason, remedy);
    } else if (knows->is_healthy) {
        tl_health_set_fault(knows, TL_HEALTH_STAGE_CONFIG, reason, remedy);
    }
}

/* The list "the workers have /job:a/task:0, /job:b/task:0" has the name. */
static bool is_listed(const char *list, const char *name)
{
    size_t len = strlen(name);
    for (const char *place = list; (place = strstr(place, name)) != NULL; place += len)
        if (place[len] == '\0' || place[len] == ',') return true;
    return false;
}

/* The tasks that workers have and this configuration lacks. */
static void note_lacking(const struct tl_config *config, const struct tl_health_finding *findings, char *ret_note)
{
    const struct tl_config_task *task;
    size_t used = 0, count = 0;
    ret_note[0] = '\0';
    for (size_t i = 0; i < config->task_count; i++) {
        if (!tl_health_tells_members(&findings[i])) continue;
        for (size_t j = 0; j < findings[i].description.peer_count; j++) {
            const char *name = findings[i].description.peers[j].name;
            if (tl_config_find_name(config, name, &task, NULL) == TL_OK || is_listed(ret_note, name)) continue;
            if (count++ < MAX_NAMES)
                used += (size_t)snprintf(ret_note + used, TL_ERROR_MESSAGE_BYTES - used, "%s%.128s",
                                         count > 1 ? ", " : "the workers have ", name);
        }
    }
    if (count > 0)
        snprintf(ret_note + used, TL_ERROR_MESSAGE_BYTES - used, "%s, which %.256s lacks",
                 count > MAX_NAMES ? " and more" : "", config->source);
}

/* A task that does not answer, and that no worker has. */
static void explain_absence(const struct tl_config *config, struct tl_health_finding *findings, size_t index)
{
    struct tl_health_finding *finding = &findings[index];
    size_t telling_count = 0;
    if (finding->has_description) return;
    for (size_t i = 0; i < config->task_count; i++) {
        if (!tl_health_tells_members(&findings[i])) continue;
        if (tl_health_find_member(&findings[i].description, finding->task->name, index)) return;
        telling_count++;
    }
    size_t len = strlen(finding->reason);
    if (telling_count > 0)
        snprintf(finding->reason + len, sizeof(finding->reason) - len,
                 ", and no worker that answers has this task in its cluster.json");
}

void tl_health_compare_members(const struct tl_config *config, struct tl_health_finding *findings, char *ret_note)
{
    for (size_t i = 0; i < config->task_count; i++) {
        struct tl_health_finding *a = &findings[i];
        explain_absence(config, findings, i);
        if (!tl_health_tells_members(a)) continue;
        for (size_t j = i + 1; j < config->task_count; j++) {
            struct tl_health_finding *b = &findings[j];
            uint64_t digest = a->description.cluster_digest;
            if (!tl_health_tells_members(b) || (digest != 0 && digest == b->description.cluster_digest)) continue;
            const struct tl_peer_description *in_a = tl_health_find_member(&a->description, b->task->name, j);
            const struct tl_peer_description *in_b = tl_health_find_member(&b->description, a->task->name, i);
            if (in_a && !in_b) set_other_cluster(a, in_a, b);
            if (in_b && !in_a) set_other_cluster(b, in_b, a);
        }
    }
    note_lacking(config, findings, ret_note);
}

/* ----------------------------------------------------------------------------------------------- two processes -- */

/* A process that claims a task, and the worker that tells of it. */
struct claim {
    struct tl_health_finding *teller; /* NULL: there is none */
    uint64_t incarnation;
    const char *host_name;
    uint64_t process_id;
};

/* What a worker says of the process behind a task. A worker of an older version does not say the host. */
static struct claim read_claim(struct tl_health_finding *teller, const struct tl_health_finding *finding, size_t index)
{
    const struct tl_description *description = &teller->description;
    if (!tl_health_is_identified(teller) || teller->is_unconfirmed) return (struct claim){.teller = NULL};
    if (teller == finding)
        return (struct claim){teller, description->incarnation, description->host_name, description->process_id};
    const struct tl_peer_description *peer = tl_health_find_member(description, finding->task->name, index);
    if (!peer || peer->incarnation == 0 || strcmp(peer->state, "up") != 0) return (struct claim){.teller = NULL};
    return (struct claim){teller, peer->incarnation, peer->host_name, peer->process_id};
}

/* Finds two claims of different processes. */
static bool find_two(const struct tl_config *config, struct tl_health_finding *findings, size_t index,
                     struct claim ret_claims[2])
{
    struct claim first = read_claim(&findings[index], &findings[index], index);
    for (size_t i = 0; i < config->task_count; i++) {
        struct claim claim = read_claim(&findings[i], &findings[index], index);
        if (!claim.teller) continue;
        if (!first.teller) first = claim;
        if (claim.incarnation == first.incarnation) continue;
        ret_claims[0] = first;
        ret_claims[1] = claim;
        return true;
    }
    return false;
}

static void format_claim(const struct claim *claim, char *ret_text, size_t capacity)
{
    if (claim->host_name[0] != '\0') {
        snprintf(ret_text, capacity, "process %" PRIu64 " on %.128s", claim->process_id, claim->host_name);
    } else {
        snprintf(ret_text, capacity, "the one with incarnation " TL_INCARNATION_FORMAT, claim->incarnation);
    }
}

static void set_rivals(struct tl_health_finding *finding, const struct claim claims[2])
{
    char first[256], second[256], reason[TL_ERROR_MESSAGE_BYTES];
    format_claim(&claims[0], first, sizeof(first));
    format_claim(&claims[1], second, sizeof(second));
    snprintf(reason, sizeof(reason), TL_RIVALS " %s: %s and %s", finding->task->name, first, second);
    tl_health_set_fault(finding, TL_HEALTH_STAGE_IDENTITY, reason, "stop one of them");
    finding->verified = TL_HEALTH_STAGE_GRPC;
}

/* A worker has seen the two processes take turns. Returns what it says; NULL: none has. */
static const char *find_witness(const struct tl_config *config, const struct tl_health_finding *findings, size_t index)
{
    for (size_t i = 0; i < config->task_count; i++) {
        if (!tl_health_is_identified(&findings[i])) continue;
        const struct tl_peer_description *peer =
            tl_health_find_member(&findings[i].description, findings[index].task->name, index);
        if (peer && strncmp(peer->reason, TL_RIVALS, strlen(TL_RIVALS)) == 0) return peer->reason;
    }
    return NULL;
}

/* The witness says "what is wrong; what to do", in a text of any length. */
static void set_witnessed(struct tl_health_finding *finding, const char *witness)
{
    const char *remedy;
    int len = (int)tl_remedy_split(witness, &remedy);
    char reason[TL_ERROR_MESSAGE_BYTES];
    snprintf(reason, sizeof(reason), "%.*s", len, witness);
    tl_health_set_fault(finding, TL_HEALTH_STAGE_IDENTITY, reason, remedy[0] != '\0' ? remedy : "stop one of them");
    finding->verified = TL_HEALTH_STAGE_GRPC;
}

bool tl_health_find_rivals(const struct tl_config *config, struct tl_health_finding *findings)
{
    struct claim claims[2];
    bool is_any = false;
    for (size_t i = 0; i < config->task_count; i++) {
        findings[i].has_rivals = !find_witness(config, findings, i) && find_two(config, findings, i, claims);
        is_any = is_any || findings[i].has_rivals;
    }
    /* A worker that has been chosen tells of no more tasks: it is chosen already. */
    for (size_t i = 0; i < config->task_count; i++) {
        for (size_t j = 0; findings[i].has_rivals && j < config->task_count; j++)
            if (read_claim(&findings[j], &findings[i], i).teller) findings[j].is_unconfirmed = true;
    }
    return is_any;
}

void tl_health_judge_rivals(const struct tl_config *config, struct tl_health_finding *findings)
{
    struct claim claims[2];
    for (size_t i = 0; i < config->task_count; i++) {
        const char *witness = find_witness(config, findings, i);
        if (witness) {
            set_witnessed(&findings[i], witness);
        } else if (findings[i].has_rivals && find_two(config, findings, i, claims)) {
            set_rivals(&findings[i], claims);
        }
    }
}
