// SPDX-License-Identifier: Apache-2.0
/* What a caller may ask of a worker, as "security.allow" names it. */
#ifndef BASE_ACTION_H
#define BASE_ACTION_H

/* The actions, each with its word in the configuration. The enum and what the configuration accepts are made from this
 * list. config/schema.json, which a test compares with it, and documents repeat the words. */
/* clang-format off */
#define TL_ACTIONS(entry) \
    entry(TL_ACTION_READ, "read") \
    entry(TL_ACTION_PUBLISH, "publish") \
    entry(TL_ACTION_PUSH, "push") \
    entry(TL_ACTION_WITHDRAW, "withdraw") \
    entry(TL_ACTION_LIST, "list") \
    entry(TL_ACTION_PEERS, "peers") \
    entry(TL_ACTION_HEALTH, "health")
/* clang-format on */

#define TL_ACTION_VALUE(action, word) action,
enum tl_action { TL_ACTIONS(TL_ACTION_VALUE) TL_ACTION_COUNT };
#undef TL_ACTION_VALUE

/* The words, in the order of the enum. */
extern const char *const tl_action_names[TL_ACTION_COUNT];

#endif
