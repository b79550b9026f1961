// SPDX-License-Identifier: Apache-2.0
/*
 * The health of a cluster: all workers are asked at the same time, by a bounded number of threads, and one row each is
 * printed. Watching repeats that; each round is printed whole.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "server/cli/cluster_tls.h"
#include "server/cli/command.h"
#include "server/cli/health.h"
#include "server/cli/json_out.h"
#include "server/cli/output.h"
#include "server/cli/table.h"
#include "server/cli/task_config.h"
#include "server/cli/threads.h"

/* A peer hears of a restart within this time, because the end of the former process ends its links. */
#define RESTART_NS (300 * TL_NS_PER_MS)

/* One round. */
struct round {
    const struct tl_health_flags *flags;
    const struct tl_config *config;
    struct tl_health_finding *findings; /* [config->task_count] */
    size_t healthy_count;
    char note[TL_ERROR_MESSAGE_BYTES]; /* what the configuration lacks; "": nothing */
};

static void ask_worker(void *context, size_t index)
{
    struct round *round = context;
    round->findings[index].task = &round->config->tasks[index];
    tl_health_check_worker(round->flags, round->config, &round->findings[index]);
}

static void ask_again(void *context, size_t index)
{
    struct round *round = context;
    if (round->findings[index].is_unconfirmed) tl_health_ask_again(round->flags, &round->findings[index]);
}

static void probe_peers(void *context, size_t index)
{
    struct round *round = context;
    tl_health_probe_peers(round->flags, round->findings, round->config->task_count, &round->findings[index]);
}

static void pause_ns(int64_t ns)
{
    const struct timespec pause = {.tv_sec = (time_t)(ns / TL_NS_PER_SEC), .tv_nsec = (long)(ns % TL_NS_PER_SEC)};
    nanosleep(&pause, NULL);
}

/* Asks all, has all that serve try each other, and compares what they say. */
static void run_round(struct round *round)
{
    const size_t count = round->config->task_count;
    tl_run_all(count, ask_worker, round);
    if (tl_health_find_rivals(round->config, round->findings)) {
        pause_ns(RESTART_NS);
        tl_run_all(count, ask_again, round);
    }
    bool has_pairs = !round->flags->is_quick && count > 1;
    if (has_pairs) tl_run_all(count, probe_peers, round);
    tl_health_compare(round->config, round->findings, round->note);
    if (has_pairs) tl_health_judge_pairs(round->config, round->findings, count);
    for (size_t i = 0; i < count; i++)
        round->healthy_count += round->findings[i].is_healthy;
    for (size_t i = 0; i < count; i++)
        if (round->findings[i].is_silent) tl_health_explain_silent(round->findings, count, &round->findings[i]);
}

void tl_health_check_cluster(const struct tl_health_flags *flags, const struct tl_config *config,
                             struct tl_health_finding *findings, char *ret_note)
{
    struct round round = {.flags = flags, .config = config, .findings = findings};
    run_round(&round);
    snprintf(ret_note, TL_ERROR_MESSAGE_BYTES, "%s", round.note);
}

void tl_health_findings_destroy(struct tl_health_finding *findings, size_t count)
{
    for (size_t i = 0; findings && i < count; i++) {
        tl_description_fini(&findings[i].description);
        free(findings[i].probes.items);
    }
    free(findings);
}

/* -------------------------------------------------------------------------------------------------------- JSON -- */

static void put_data_plane(struct tl_json_out *worker, const struct tl_data_plane_description *data_plane)
{
    struct tl_json_out *object = tl_json_out_put_object(worker, "data_plane");
    tl_json_out_put_text(object, "memlock", data_plane->memlock);
    tl_json_out_put_text(object, "device", data_plane->device);
    tl_json_out_put_u64(object, "port", data_plane->port);
    tl_json_out_put_u64(object, "gid_index", data_plane->gid_index);
    tl_json_out_put_text(object, "gid", data_plane->gid);
    tl_json_out_put_text(object, "gid_type", data_plane->gid_type);
    tl_json_out_put_text(object, "interface", data_plane->interface);
    tl_json_out_put_text(object, "port_state", data_plane->port_state);
    tl_json_out_put_text(object, "link_layer", data_plane->link_layer);
    tl_json_out_put_u64(object, "mtu", data_plane->mtu_bytes);
    tl_json_out_put_text(object, "keys", data_plane->keys);
    tl_json_out_put_text(object, "reason", data_plane->reason);
    tl_json_out_put_text(object, "passed_over", data_plane->passed_over);
    tl_json_out_put_text(object, "not_tried", data_plane->not_tried);
    if (data_plane->keys[0] != '\0') tl_json_out_put_bool(object, "isolated", strcmp(data_plane->keys, "region") != 0);
}

static void put_troubles(struct tl_json_out *worker, const struct tl_description *description)
{
    struct tl_json_out *troubles = tl_json_out_put_array(worker, "troubles");
    for (size_t i = 0; i < description->trouble_count; i++) {
        const struct tl_trouble *from = &description->troubles[i];
        struct tl_json_out *trouble = tl_json_out_append_object(troubles);
        tl_json_out_put_text(trouble, "what", from->what);
        tl_json_out_put_text(trouble, "reason", from->reason);
        tl_json_out_put_text(trouble, "remedy", from->remedy);
        tl_json_out_put_bool(trouble, "breaks_transfers", from->breaks_transfers);
    }
}

static void put_gpus(struct tl_json_out *worker, const struct tl_description *description)
{
    struct tl_json_out *gpus = tl_json_out_put_array(worker, "gpus");
    for (size_t i = 0; i < description->gpu_count; i++) {
        const struct tl_gpu_description *from = &description->gpus[i];
        struct tl_json_out *gpu = tl_json_out_append_object(gpus);
        tl_json_out_put_text(gpu, "name", from->name);
        tl_json_out_put_text(gpu, "model", from->model);
        tl_json_out_put_text(gpu, "pci_address", from->pci_address);
        tl_json_out_put_bool(gpu, "lost", from->is_lost);
        tl_json_out_put_bool(gpu, "kept_on", from->is_kept_on);
        tl_json_out_put_text(gpu, "card", from->card);
        tl_json_out_put_text(gpu, "distance", from->distance);
        tl_json_out_put_text(gpu, "path", from->path);
        tl_json_out_put_text(gpu, "reason", from->reason);
    }
}

static void put_transports(struct tl_json_out *worker, const struct tl_description *description)
{
    struct tl_json_out *transports = tl_json_out_put_array(worker, "transports");
    for (size_t i = 0; i < description->transport_count; i++) {
        const struct tl_transport_state *from = &description->transports[i];
        struct tl_json_out *transport = tl_json_out_append_object(transports);
        tl_json_out_put_text(transport, "name", from->name);
        tl_json_out_put_bool(transport, "available", from->is_available);
        tl_json_out_put_text(transport, "reason", from->reason);
    }
}

static void put_peers(struct tl_json_out *worker, const struct tl_description *description)
{
    struct tl_json_out *peers = tl_json_out_put_array(worker, "peers");
    for (size_t i = 0; i < description->peer_count; i++) {
        const struct tl_peer_description *from = &description->peers[i];
        struct tl_json_out *peer = tl_json_out_append_object(peers);
        tl_json_out_put_text(peer, "name", from->name);
        tl_json_out_put_text(peer, "state", from->state);
        tl_json_out_put_text(peer, "transport", from->transport);
        tl_json_out_put_text(peer, "reason", from->reason);
        tl_json_out_put_text(peer, "address", from->address);
        tl_json_out_put_incarnation(peer, "incarnation", from->incarnation);
        if (from->latency_ns > 0) tl_json_out_put_u64(peer, "latency_ns", from->latency_ns);
        if (from->bytes_per_second > 0) tl_json_out_put_u64(peer, "bytes_per_second", from->bytes_per_second);
        if (from->mtu_bytes > 0) tl_json_out_put_u64(peer, "mtu", from->mtu_bytes);
    }
}

static void put_description(struct tl_json_out *worker, const struct tl_description *description)
{
    tl_json_out_put_incarnation(worker, "incarnation", description->incarnation);
    tl_json_out_put_text(worker, "version", description->software_version);
    if (description->host_name[0] != '\0') {
        tl_json_out_put_text(worker, "host_name", description->host_name);
        tl_json_out_put_u64(worker, "process_id", description->process_id);
    }
    struct tl_json_out *settings = tl_json_out_put_object(worker, "settings");
    for (size_t i = 0; i < description->setting_count; i++)
        tl_json_out_put_text(settings, description->settings[i].path, description->settings[i].value);
    struct tl_json_out *listens = tl_json_out_put_array(worker, "listens");
    for (size_t i = 0; i < description->listen_count; i++)
        tl_json_out_append_text(listens, description->listens[i]);
    tl_json_out_put_real(worker, "uptime_seconds", (double)description->uptime_ns / (double)TL_NS_PER_SEC);
    put_transports(worker, description);
    put_peers(worker, description);
    put_troubles(worker, description);
    put_gpus(worker, description);
    if (description->data_plane) put_data_plane(worker, description->data_plane);
    struct tl_json_out *counters = tl_json_out_put_object(worker, "counters");
    for (size_t i = 0; i < description->counter_count; i++)
        tl_json_out_put_u64(counters, description->counters[i].name, description->counters[i].value);
}

static void put_probes(struct tl_json_out *worker, const struct tl_probe_results *probes)
{
    struct tl_json_out *items = tl_json_out_put_array(worker, "probes");
    for (size_t i = 0; i < probes->count; i++) {
        const struct tl_peer_probe *probe = &probes->items[i];
        struct tl_json_out *item = tl_json_out_append_object(items);
        tl_json_out_put_text(item, "peer", probe->name);
        tl_json_out_put_text(item, "address", probe->address);
        tl_json_out_put_bool(item, "ok", probe->is_ok);
        tl_json_out_put_text(item, "stage", probe->stage);
        tl_json_out_put_text(item, "direction", probe->direction);
        tl_json_out_put_text(item, "reason", probe->reason);
        tl_json_out_put_text(item, "remedy", probe->remedy);
        tl_json_out_put_incarnation(item, "incarnation", probe->incarnation);
        tl_json_out_put_real(item, "age_seconds", (double)probe->age_ns / (double)TL_NS_PER_SEC);
        tl_json_out_put_real(item, "clock_offset_seconds", (double)probe->clock_offset_ns / (double)TL_NS_PER_SEC);
    }
}

static bool print_json(const struct round *round)
{
    struct tl_json_out *root = tl_json_out_object();
    tl_json_out_put_bool(root, "healthy", round->healthy_count == round->config->task_count);
    tl_json_out_put_text(root, "note", round->note);
    struct tl_json_out *workers = tl_json_out_put_array(root, "workers");
    for (size_t i = 0; i < round->config->task_count; i++) {
        const struct tl_health_finding *finding = &round->findings[i];
        struct tl_json_out *worker = tl_json_out_append_object(workers);
        tl_json_out_put_text(worker, "name", finding->task->name);
        tl_json_out_put_text(worker, "address", finding->task->address);
        tl_json_out_put_bool(worker, "healthy", finding->is_healthy);
        tl_json_out_put_text(worker, "stage", tl_health_stage_name(finding->stage));
        tl_json_out_put_text(worker, "verified", tl_health_stage_name(finding->verified));
        tl_json_out_put_text(worker, "reason", finding->reason);
        tl_json_out_put_text(worker, "remedy", finding->remedy);
        if (finding->has_description) put_description(worker, &finding->description);
        if (finding->probes.items != NULL) put_probes(worker, &finding->probes);
    }
    return tl_json_out_print(root, round->flags->is_watching);
}

/* ------------------------------------------------------------------------------------------------------- table -- */

/* "mlx5_0:1", without the port where that is not known. */
static void add_device(struct tl_table *table, const struct tl_data_plane_description *data_plane)
{
    if (!data_plane || data_plane->device[0] == '\0') {
        tl_table_add(table, "-");
    } else if (data_plane->port == 0) {
        tl_table_add(table, "%s", data_plane->device);
    } else {
        tl_table_add(table, "%s:%" PRIu32, data_plane->device, data_plane->port);
    }
}

/* What a worker says about itself that is not the reason already. */
static void add_troubles(struct tl_table *table, const struct tl_health_finding *finding)
{
    for (size_t i = 0; i < finding->description.trouble_count; i++) {
        char text[2 * TL_ERROR_MESSAGE_BYTES];
        const struct tl_trouble *trouble = &finding->description.troubles[i];
        if (strcmp(trouble->reason, finding->reason) == 0) continue;
        snprintf(text, sizeof(text), "%s; %s", trouble->reason, trouble->remedy);
        tl_table_add_note(table, "warning", text);
    }
}

/* What is known of the GPUs of a worker. Without --pairs only those are told that a card was to access and cannot. */
static void add_gpus(struct tl_table *table, const struct tl_health_finding *finding, bool has_pairs)
{
    for (size_t i = 0; i < finding->description.gpu_count; i++) {
        char text[2 * TL_ERROR_MESSAGE_BYTES], way[512] = "";
        const struct tl_gpu_description *gpu = &finding->description.gpus[i];
        if (!has_pairs && !gpu->is_slower) continue;
        if (gpu->card[0] != '\0') snprintf(way, sizeof(way), " over %s (distance: %s)", gpu->card, gpu->distance);
        snprintf(text, sizeof(text), "%s, %s at %s%s%s; tensors travel as %s%s%s%s", gpu->name,
                 gpu->model[0] != '\0' ? gpu->model : "unknown model",
                 gpu->pci_address[0] != '\0' ? gpu->pci_address : "an unknown place",
                 gpu->is_kept_on ? ", keeps published files and pushed tensors" : "", gpu->is_lost ? ", lost" : "",
                 gpu->path[0] != '\0' ? gpu->path : "gpu-direct or gpu-proxy", way, gpu->reason[0] != '\0' ? ": " : "",
                 gpu->reason);
        tl_table_add_note(table, "gpu", text);
    }
}

static bool print_workers(const struct round *round)
{
    static const struct tl_column columns[] = {
        {.title = "WORKER", .wraps = true},
        {.title = "ADDRESS", .wraps = true},
        {.title = "HEALTHY"},
        {.title = "STAGE"},
        {.title = "VERSION", .is_optional = true},
        {.title = "DEVICE", .is_optional = true},
        {.title = "INCARNATION", .is_optional = true},
    };
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < round->config->task_count; i++) {
        const struct tl_health_finding *finding = &round->findings[i];
        tl_table_add(table, "%s", finding->task->name);
        tl_table_add(table, "%s", finding->task->address);
        tl_table_add(table, "%s", finding->is_healthy ? "yes" : "no");
        tl_table_paint(table, finding->is_healthy ? TL_COLOUR_GREEN : TL_COLOUR_RED);
        tl_table_add(table, "%s", tl_health_stage_name(finding->stage));
        tl_table_add(table, "%s", finding->has_description ? finding->description.software_version : "-");
        add_device(table, finding->description.data_plane);
        if (round->flags->has_incarnations && finding->has_description) {
            tl_table_add(table, TL_INCARNATION_FORMAT, finding->description.incarnation);
        } else {
            tl_table_add(table, "-");
        }
        tl_table_add_note(table, "reason", finding->reason);
        tl_table_add_note(table, "remedy", finding->remedy);
        add_troubles(table, finding);
        add_gpus(table, finding, round->flags->has_pairs);
    }
    bool is_printed = tl_table_print(table, stdout);
    tl_table_destroy(table);
    return is_printed;
}

/* What was measured between two workers, "-" where nothing was. */
static void add_measures(struct tl_table *table, const struct tl_peer_description *peer)
{
    char size[32];
    if (peer->latency_ns > 0) {
        tl_table_add(table, "%.1f us", (double)peer->latency_ns / 1e3);
    } else {
        tl_table_add(table, "-");
    }
    if (peer->bytes_per_second > 0) {
        tl_table_add(table, "%s/s", tl_text_format_size(peer->bytes_per_second, size, sizeof(size)));
    } else {
        tl_table_add(table, "-");
    }
}

/* The rate of a path over shared memory, of which its reader must know what was copied. */
static bool has_local_rate(const struct tl_description *description)
{
    for (size_t i = 0; i < description->peer_count; i++) {
        const struct tl_peer_description *peer = &description->peers[i];
        if (peer->bytes_per_second > 0 && strcmp(peer->transport, "local") == 0) return true;
    }
    return false;
}

/* "ok", or the stage at which the probe of a peer failed; "-": there was none. */
static const char *probe_text(const struct tl_health_finding *finding, const char *peer)
{
    for (size_t i = 0; i < finding->probes.count; i++) {
        const struct tl_peer_probe *probe = &finding->probes.items[i];
        if (strcmp(probe->name, peer) != 0) continue;
        return probe->stage[0] != '\0' ? probe->stage : probe->reason[0] == '\0' ? "ok" : "-";
    }
    return "-";
}

/* How every worker sees every other. */
static bool print_pairs(const struct round *round)
{
    static const struct tl_column columns[] = {
        {.title = "FROM", .wraps = true},
        {.title = "TO", .wraps = true},
        {.title = "STATE"},
        {.title = "PROBE", .is_optional = true},
        {.title = "TRANSPORT", .is_optional = true},
        {.title = "LATENCY", .is_right = true, .is_optional = true},
        {.title = "RATE", .is_right = true, .is_optional = true},
    };
    bool is_cached = false;
    struct tl_table *table = tl_table_create(columns, TL_ARRAY_COUNT(columns));
    if (!table) return false;
    for (size_t i = 0; i < round->config->task_count; i++) {
        const struct tl_health_finding *finding = &round->findings[i];
        is_cached = is_cached || has_local_rate(&finding->description);
        for (size_t j = 0; j < finding->description.peer_count; j++) {
            const struct tl_peer_description *peer = &finding->description.peers[j];
            tl_table_add(table, "%s", finding->task->name);
            tl_table_add(table, "%s", peer->name);
            tl_table_add(table, "%s", peer->state);
            tl_table_add(table, "%s", probe_text(finding, peer->name));
            tl_table_add(table, "%s", peer->transport[0] ? peer->transport : "-");
            add_measures(table, peer);
            tl_table_add_note(table, "reason", peer->reason);
        }
    }
    putchar('\n');
    bool is_printed = tl_table_print(table, stdout);
    if (is_cached) {
        puts("The rate over local is that of the processor's caches: it was measured with\n"
             "the same 64 KiB again and again. Larger tensors are copied at memory's rate.");
    }
    putchar('\n');
    tl_table_destroy(table);
    return is_printed;
}

static bool print_tables(const struct round *round)
{
    if (round->flags->is_watching) {
        char text[64];
        struct tm local;
        time_t now = time(NULL);
        if (isatty(STDOUT_FILENO) == 1) fputs("\033[H\033[J", stdout);
        if (localtime_r(&now, &local) && strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local) > 0)
            printf("%s\n", text);
    }
    if (!print_workers(round)) return false;
    if (round->flags->has_pairs && !print_pairs(round)) return false;
    size_t unable_count = 0;
    for (size_t i = 0; i < round->config->task_count; i++)
        unable_count += round->findings[i].cannot_probe;
    if (unable_count > 0) printf("%zu workers could not probe their peers\n", unable_count);
    printf("%zu of %zu workers are healthy\n", round->healthy_count, round->config->task_count);
    if (round->note[0] != '\0') {
        tl_output_put_escaped(stdout, round->note);
        putchar('\n');
    }
    return true;
}

/* ------------------------------------------------------------------------------------------------------ rounds -- */

static int run_and_print(const struct tl_health_flags *flags, const struct tl_config *config)
{
    struct round round = {.flags = flags, .config = config};
    bool is_printed = false;
    round.findings = calloc(config->task_count, sizeof(*round.findings));
    if (round.findings) {
        run_round(&round);
        is_printed = flags->is_json ? print_json(&round) : print_tables(&round);
    }
    bool is_healthy = round.healthy_count == config->task_count;
    tl_health_findings_destroy(round.findings, round.config->task_count);
    if (!is_printed) {
        tl_output_error("health", "no memory for the result");
        return TL_HEALTH_EXIT_USAGE;
    }
    if (tl_output_finish("health", TL_EXIT_OK) != TL_EXIT_OK) return TL_HEALTH_EXIT_USAGE;
    return is_healthy ? TL_HEALTH_EXIT_OK : TL_HEALTH_EXIT_UNHEALTHY;
}

/* The configuration cannot be read: no worker can be asked. */
static int report_config(const struct tl_health_flags *flags, const struct tl_error *error)
{
    tl_output_error("health", "%s", error->message);
    if (flags->is_json) {
        struct tl_json_out *root = tl_json_out_object();
        tl_json_out_put_bool(root, "healthy", false);
        tl_json_out_put_text(root, "stage", tl_health_stage_name(TL_HEALTH_STAGE_CONFIG));
        tl_json_out_put_text(root, "reason", error->message);
        tl_json_out_put_text(root, "note", "");
        tl_json_out_put_array(root, "workers");
        if (tl_json_out_print(root, flags->is_watching)) fflush(stdout);
    }
    return TL_HEALTH_EXIT_USAGE;
}

int tl_health_cluster(const struct tl_health_flags *flags)
{
    struct tl_config *config = NULL;
    struct tl_error error;
    int code;
    enum tl_status status = tl_config_read(flags->config_path, &config, &error);
    if (status == TL_OK) status = tl_task_config_apply_environment(config, "health", &error);
    if (status == TL_OK) status = tl_cluster_tls_open(&config->client_settings, &error);
    if (status != TL_OK) {
        tl_config_destroy(config);
        return report_config(flags, &error);
    }
    for (;;) {
        code = run_and_print(flags, config);
        /* A reader that has gone ends the watch. */
        if (!flags->is_watching || code == TL_HEALTH_EXIT_USAGE) break;
        pause_ns(flags->interval_ns);
    }
    tl_config_destroy(config);
    return code;
}
