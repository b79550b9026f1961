// SPDX-License-Identifier: Apache-2.0
/* The table of all settings: for each its name, its field, what it may be, and its default. */
#ifndef CONFIG_SETTINGS_TABLE_H
#define CONFIG_SETTINGS_TABLE_H

#include "config/setting_value.h"
#include "config/settings.h"

/* Every setting, in the order of struct tl_settings. */
extern const struct tl_setting tl_settings_table[]; /* [tl_settings_count] */
extern const size_t tl_settings_count;

/* The entry of the table for the member of struct tl_settings at this offset. */
size_t tl_settings_find(size_t offset);

/* The words of "protocol". */
extern const struct tl_choice tl_protocol_choices[];

#endif
