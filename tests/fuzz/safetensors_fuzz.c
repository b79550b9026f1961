// SPDX-License-Identifier: Apache-2.0
/*
 * Fuzzes the parser of safetensors headers, which trusts nothing: any bytes are accepted or refused with a status and a
 * message, never more.
 */
#include <string.h>

#include "base/check.h"
#include "base/text.h"
#include "tensor/tensor_file.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len_bytes)
{
    struct tl_error error = {.code = TL_OK};
    enum tl_status status = tl_safetensors_check(data, len_bytes, "input", &error);
    TL_CHECK(status == TL_OK || status == TL_INVALID_ARGUMENT || status == TL_RESOURCE_EXHAUSTED);
    TL_CHECK(error.code == status);
    TL_CHECK(status == TL_OK || tl_text_is_utf8(error.message, strlen(error.message)));
    return 0;
}
