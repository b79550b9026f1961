// SPDX-License-Identifier: Apache-2.0
#include "base/action.h"

#define NAME_OF(action, word) [action] = word,
const char *const tl_action_names[TL_ACTION_COUNT] = {TL_ACTIONS(NAME_OF)};
