// SPDX-License-Identifier: Apache-2.0
/*
 * What waits to be sent on links: how much of it a worker keeps, and the statuses among it.
 *
 * A request that is answered and not sent takes some hundred bytes. A peer that asks and does not take is therefore not
 * read any more once so many answers wait that its share of options.max_unsent is used up. Nothing is refused: what was
 * not read waits at the peer, and is read when answers have left. Only links that the peer has opened are held up: if
 * both sides stopped reading, neither could send, for ever. A peer that this worker has called is in its configuration,
 * which is trusted.
 *
 * A link takes its share in steps, so that an answer costs one comparison. It gives back what it does not need, and all
 * of it when nothing waits: links that are idle would otherwise keep the whole bound among them.
 *
 * Many answers are the same status, as when a step was aborted. They refer to one copy of it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/text.h"
#include "control/link_serves.h"

#define MAX_STEP 256
/* Answers of each link that need no share, so that a link whose peer takes them is read however many others there are.
 */
#define FREE_UNSENT 32
/* So many answers, with so few bytes that they leave within a millisecond or so, keep a link busy. What is read sooner
 * would wait behind them, and leave the caches meanwhile. */
#define BUSY_UNSENT 1024
#define BUSY_BYTES (512 * 1024)

static uint64_t step_of(const struct tl_link *link)
{
    uint64_t step = link->control->options.max_unsent / 64;
    return step == 0 ? 1 : tl_min_u64(step, MAX_STEP);
}

/* Whether the answers that wait will leave soon, and suffice until then. */
static bool is_busy(const struct tl_link *link)
{
    const struct link_answers *answers = &link->answers;
    if (answers->unsent_count < BUSY_UNSENT || answers->staging_count + answers->fenced_count > 0) return false;
    return tl_list_is_empty(&answers->failures) && answers->unbegun_bytes + link_active_bytes(link, 0) < BUSY_BYTES;
}

bool link_is_congested(struct tl_link *link)
{
    if (link->is_ours) return false;
    if (is_busy(link)) return true;
    while (link->answers.unsent_count >= FREE_UNSENT + link->answers.unsent_left) {
        uint64_t step = step_of(link);
        if (tl_shares_take(link->control->unsent, &link->peer.client, step, &link->answers.unsent_share, NULL) !=
            TL_OK) {
            return true;
        }
        link->answers.unsent_left += step;
    }
    return false;
}

void link_unsent_release_quota(struct tl_link *link)
{
    uint64_t step = step_of(link);
    if (link->answers.unsent_count == 0) {
        link_unsent_fini(link);
        return;
    }
    uint64_t needed = link->answers.unsent_count + 2 * step; /* so that it is not taken again at once */
    if (link->answers.unsent_left <= needed) return;
    uint64_t given = (link->answers.unsent_left - needed) / step * step;
    if (given == 0) return;
    link->answers.unsent_left -= given;
    tl_shares_give(link->answers.unsent_share, given);
}

void link_unsent_fini(struct tl_link *link)
{
    if (link->answers.unsent_left > 0) tl_shares_give(link->answers.unsent_share, link->answers.unsent_left);
    link->answers.unsent_left = 0;
}

/* ---------------------------------------------------------------------------------------------------- statuses -- */

struct link_status *link_status_get(struct tl_link *link, const struct tl_error *error)
{
    struct link_status *status = link->answers.last_status;
    /* The peer ends a link with a frame whose text is not UTF-8, and a failure may name a file whose path is not. */
    struct tl_error sent = *error;
    size_t message_bytes = strlen(sent.message) + 1;
    tl_text_make_utf8(sent.message, message_bytes);
    if (status != NULL && status->code == sent.code && strcmp(status->message, sent.message) == 0) {
        status->reference_count++;
        return status;
    }
    status = malloc(sizeof(*status) + message_bytes);
    if (status == NULL) return NULL;
    status->reference_count = 1;
    status->code = sent.code;
    memcpy(status->message, sent.message, message_bytes);
    link->answers.last_status = status;
    return status;
}

void link_status_put(struct tl_link *link, struct link_status *status)
{
    if (status == NULL || --status->reference_count > 0) return;
    if (link->answers.last_status == status) link->answers.last_status = NULL;
    free(status);
}
