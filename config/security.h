// SPDX-License-Identifier: Apache-2.0
/* What the settings under "security" mean together, and for one process. */
#ifndef CONFIG_SECURITY_H
#define CONFIG_SECURITY_H

#include <tensorlane/status.h>

#include "config/settings_layer.h"

#define TL_SECURITY_FILE_COUNT 4

/* Checks the settings of "security" with each other and with those that they exclude.
 * Errors: TL_INVALID_ARGUMENT: they contradict each other, or lack a part. */
enum tl_status tl_security_check(const struct tl_settings_layer *layer, struct tl_json_doc *doc,
                                 struct tl_error *ret_error) TL_MUST_USE;

/* Values that differ between processes of one layer, as JSON; NULL: the value is that of the layer. */
struct tl_security_files {
    const char *values[TL_SECURITY_FILE_COUNT]; /* ca, certificate, key, crl */
};

/* Replaces "{name}" in the files by the name of the task, "ps-0", or by "client" where task is NULL. False: no memory.
 */
bool tl_security_name_files(struct tl_settings *settings, const struct tl_config_task *task, struct tl_arena *arena,
                            struct tl_security_files *ret_files);

/* The value of a setting of kind TL_SETTING_FILE; NULL: it is that of the layer. */
const char *tl_security_file_value(const struct tl_security_files *files, const struct tl_setting *setting);

#endif
