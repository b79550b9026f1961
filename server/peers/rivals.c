// SPDX-License-Identifier: Apache-2.0
#include "server/peers/rivals.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

/* A process that has come back so often is no late link of one that has ended. */
#define MIN_RETURNS 2
/* Without a return for so long there is one process again. */
#define ACTIVE_NS (60 * TL_NS_PER_SEC)
#define LOG_PAUSE_NS (60 * TL_NS_PER_SEC)

/* "process 17 on gpu-1 (ipv4:10.0.0.7:4000)"; one of an older version does not say the former two. */
static void format_process(const struct tl_identity *who, char *ret_text, size_t capacity)
{
    if (who->host_name[0] != '\0') {
        snprintf(ret_text, capacity, "process %" PRIu64 " on %.128s (%.128s)", who->process_id, who->host_name,
                 who->address);
    } else {
        snprintf(ret_text, capacity, "a process at %.128s", who->address);
    }
}

void tl_rivals_format(const struct tl_rivals *rivals, const char *name, char *ret_text, size_t capacity)
{
    char latest[320], former[320];
    format_process(&rivals->latest, latest, sizeof(latest));
    format_process(&rivals->former, former, sizeof(former));
    snprintf(ret_text, capacity,
             TL_RIVALS " %s: %s and %s, which last took turns %" PRId64 " s ago; stop one of them, if both still run",
             name, latest, former, (tl_clock_now_ns() - rivals->returned_ns) / TL_NS_PER_SEC);
}

bool tl_rivals_are_active(const struct tl_rivals *rivals)
{
    return rivals->return_count >= MIN_RETURNS && tl_clock_now_ns() - rivals->returned_ns < ACTIVE_NS;
}

void tl_rivals_note(struct tl_rivals *rivals, const char *name, const struct tl_identity *who)
{
    int64_t now_ns = tl_clock_now_ns();
    if (who->incarnation == rivals->latest.incarnation) return;
    if (who->incarnation == rivals->former.incarnation) {
        if (now_ns - rivals->returned_ns >= ACTIVE_NS) rivals->return_count = 0;
        rivals->return_count++;
        rivals->returned_ns = now_ns;
    }
    rivals->former = rivals->latest;
    rivals->latest = *who;
    if (!tl_rivals_are_active(rivals)) return;
    if (rivals->warned_ns != 0 && now_ns - rivals->warned_ns < LOG_PAUSE_NS) return;
    char text[TL_ERROR_MESSAGE_BYTES];
    rivals->warned_ns = now_ns;
    tl_rivals_format(rivals, name, text, sizeof(text));
    TL_LOG_AT_WARN("two processes claim one task", TL_STR("peer", name), TL_STR("reason", text));
}
