// SPDX-License-Identifier: Apache-2.0
/* Control messages: every type there and back, its bytes on the wire, every truncation, every flag, hostile values. */
#include "dataplane/engine/message.h"

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fakes/run_suite.h"
#include "tensor/transfer.h"

static uint8_t buffer[TL_SLOT_BYTES];
static struct tl_message message;
static struct tl_message decoded;
static struct tl_error error;

static const enum tl_message_type types[] = {
    TL_MESSAGE_HELLO,   TL_MESSAGE_PROBED,       TL_MESSAGE_REQUEST, TL_MESSAGE_META_DATA_UPDATE, TL_MESSAGE_RE_REQUEST,
    TL_MESSAGE_DONE,    TL_MESSAGE_ERROR_STATUS, TL_MESSAGE_CANCEL,  TL_MESSAGE_CANCELLED,        TL_MESSAGE_CREDIT,
    TL_MESSAGE_GOODBYE, TL_MESSAGE_MAPPED,       TL_MESSAGE_SOURCE,  TL_MESSAGE_COPIED,
};
#define TYPE_COUNT ((int)(sizeof(types) / sizeof(types[0])))

static const struct tl_meta_data matrix = {.dtype = TL_F32, .shape = {.rank = 2, .dims = {3, 5}}, .size_bytes = 60};

static const uint8_t value_bytes[60] = {1, 2, 3, [59] = 60};

/* Fills the message with every field that its type can have. */
static void compose(enum tl_message_type type)
{
    message = (struct tl_message){
        .type = type,
        .handle = 0xfffefdfc,
        .version = 0x11121314,
        .incarnation = UINT64_C(0x2122232425262728),
        .token = UINT64_C(0x3132333435363738),
        .challenge = UINT64_C(0x4142434445464748),
        .number = UINT64_C(0x5152535455565758),
        .step = UINT64_C(0x6162636465666768),
        .expected_step = UINT64_MAX,
        .subscription = UINT64_C(0x9192939495969798),
        .checksum = UINT64_C(0x7172737475767778),
        .offset = UINT64_C(0x8182838485868788),
        .lap_bytes = UINT64_C(0xa1a2a3a4a5a6a7a8),
        .meta_data = matrix,
        .destination = {.len_bytes = 5, .bytes = "abcd"},
        .code = TL_ABORTED,
        .text = "step 7 was given up",
        .key = "layer/weights",
        .data = value_bytes,
    };
    message.has_meta_data = type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_META_DATA_UPDATE ||
                            type == TL_MESSAGE_DONE || type == TL_MESSAGE_MAPPED || type == TL_MESSAGE_SOURCE;
    message.has_checksum = type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_DONE || type == TL_MESSAGE_SOURCE;
    message.is_final = type == TL_MESSAGE_ERROR_STATUS;
    message.is_ping = type == TL_MESSAGE_CREDIT;
    message.is_file_slow = type == TL_MESSAGE_META_DATA_UPDATE;
    message.is_published = type == TL_MESSAGE_META_DATA_UPDATE || type == TL_MESSAGE_DONE ||
                           type == TL_MESSAGE_MAPPED || type == TL_MESSAGE_SOURCE;
    message.may_map = type == TL_MESSAGE_REQUEST;
    message.is_on_device = type == TL_MESSAGE_SOURCE;
    message.is_copying = type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_RE_REQUEST || type == TL_MESSAGE_SOURCE;
    message.is_reading = type == TL_MESSAGE_REQUEST;
    message.is_remote = message.is_fixed = type == TL_MESSAGE_REQUEST;
}

static uint32_t encode(void)
{
    memset(buffer, 0xee, sizeof(buffer));
    uint32_t len_bytes = tl_message_encode(&message, buffer);
    ck_assert_uint_le(len_bytes, tl_message_most_bytes(&message));
    ck_assert_uint_le(len_bytes, TL_MESSAGE_BYTES);
    ck_assert_uint_eq(buffer[len_bytes], 0xee);
    return len_bytes;
}

/* The copy has exactly that size, so that a sanitizer sees a read beyond it. */
static enum tl_status decode(uint32_t len_bytes)
{
    uint8_t *copy = malloc(len_bytes > 0 ? len_bytes : 1);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, buffer, len_bytes);
    memset(&decoded, 0xdd, sizeof(decoded));
    error = (struct tl_error){.code = TL_OK};
    enum tl_status status = tl_message_decode(copy, len_bytes, &decoded, &error);
    free(copy);
    ck_assert_int_eq(status, error.code);
    if (status != TL_OK) {
        ck_assert_int_eq(status, TL_INVALID_ARGUMENT);
        ck_assert_uint_gt(strlen(error.message), 0);
    }
    return status;
}

static void set_len(uint32_t len_bytes)
{
    buffer[2] = (uint8_t)len_bytes;
    buffer[3] = (uint8_t)(len_bytes >> 8);
}

static void expect_refused(uint32_t len_bytes)
{
    ck_assert_int_eq(decode(len_bytes), TL_INVALID_ARGUMENT);
}

/* ---------------------------------------------------------------------------------------------- there and back -- */

static void expect_same_body(void)
{
    enum tl_message_type type = message.type;
    if (type == TL_MESSAGE_HELLO) {
        ck_assert_uint_eq(decoded.version, message.version);
        ck_assert_uint_eq(decoded.incarnation, message.incarnation);
        ck_assert_uint_eq(decoded.token, message.token);
        ck_assert_uint_eq(decoded.challenge, message.challenge);
    }
    if (type == TL_MESSAGE_REQUEST) {
        ck_assert_uint_eq(decoded.number, message.number);
        ck_assert_uint_eq(decoded.expected_step, message.expected_step);
        ck_assert_uint_eq(decoded.subscription, message.subscription);
        ck_assert_int_eq(decoded.key_form, message.key_form);
        ck_assert_uint_eq(decoded.key_number, message.key_number);
        ck_assert_uint_eq(decoded.priority, message.priority);
        bool has_text = message.key_form == TL_KEY_TEXT || message.key_form == TL_KEY_NEW;
        ck_assert_ptr_eq(decoded.key, has_text ? decoded.text_capacity : NULL);
        if (has_text) ck_assert_str_eq(decoded.key, message.key);
    }
    if (type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_META_DATA_UPDATE || type == TL_MESSAGE_DONE ||
        type == TL_MESSAGE_MAPPED || type == TL_MESSAGE_SOURCE) {
        ck_assert_uint_eq(decoded.step, message.step);
        if (message.has_meta_data) ck_assert(tl_meta_data_is_equal(&decoded.meta_data, &message.meta_data));
    }
    bool has_checksum_field = type == TL_MESSAGE_DONE || type == TL_MESSAGE_SOURCE;
    if (has_checksum_field && message.has_checksum) ck_assert_uint_eq(decoded.checksum, message.checksum);
    if (type == TL_MESSAGE_MAPPED) ck_assert_uint_eq(decoded.offset, message.offset);
    if (type == TL_MESSAGE_HELLO || type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_RE_REQUEST ||
        type == TL_MESSAGE_MAPPED || type == TL_MESSAGE_SOURCE) {
        ck_assert_uint_eq(decoded.destination.len_bytes, message.destination.len_bytes);
        ck_assert_mem_eq(decoded.destination.bytes, message.destination.bytes, message.destination.len_bytes);
    }
    bool has_lap = type == TL_MESSAGE_REQUEST || type == TL_MESSAGE_RE_REQUEST;
    if (has_lap && message.is_copying) ck_assert_uint_eq(decoded.lap_bytes, message.lap_bytes);
    if (type == TL_MESSAGE_ERROR_STATUS) {
        ck_assert_int_eq(decoded.code, message.code);
        ck_assert_str_eq(decoded.text, message.text);
        ck_assert_ptr_eq(decoded.text, decoded.text_capacity);
    }
}

static void expect_round_trip(void)
{
    uint32_t len_bytes = encode();
    ck_assert_msg(decode(len_bytes) == TL_OK, "%s: %s", tl_message_name(message.type), error.message);
    ck_assert_int_eq(decoded.type, message.type);
    ck_assert_uint_eq(decoded.handle, message.handle);
    ck_assert_int_eq(decoded.has_meta_data, message.has_meta_data);
    ck_assert_int_eq(decoded.has_checksum, message.has_checksum);
    ck_assert_int_eq(decoded.is_final, message.is_final);
    ck_assert_int_eq(decoded.is_ping, message.is_ping);
    ck_assert_int_eq(decoded.is_published, message.is_published);
    ck_assert_int_eq(decoded.may_map, message.may_map);
    ck_assert_int_eq(decoded.is_on_device, message.is_on_device);
    ck_assert_int_eq(decoded.is_copying, message.is_copying);
    ck_assert_int_eq(decoded.is_reading, message.is_reading);
    ck_assert_int_eq(decoded.is_inline, message.is_inline);
    ck_assert_int_eq(decoded.is_remote, message.is_remote);
    ck_assert_int_eq(decoded.is_fixed, message.is_fixed);
    expect_same_body();
}

START_TEST(round_trip)
{
    compose(types[_i]);
    expect_round_trip();
    message.has_meta_data = false;
    expect_round_trip();
    message.has_checksum = false;
    expect_round_trip();
    message.is_final = false;
    message.is_ping = false;
    message.is_published = false;
    message.may_map = false;
    message.is_on_device = false;
    message.is_copying = false;
    message.is_reading = false;
    message.is_remote = message.is_fixed = false;
    expect_round_trip();
    message.handle = 0;
    message.destination.len_bytes = 0;
    expect_round_trip();
}
END_TEST

START_TEST(names)
{
    for (int i = 0; i < TYPE_COUNT; i++)
        ck_assert_str_ne(tl_message_name(types[i]), "?");
    ck_assert_str_eq(tl_message_name(TL_MESSAGE_RE_REQUEST), "RE_REQUEST");
    ck_assert_str_eq(tl_message_name((enum tl_message_type)0), "?");
    ck_assert_str_eq(tl_message_name((enum tl_message_type)(TL_MESSAGE_COPIED + 1)), "?");
    ck_assert_str_eq(tl_message_name((enum tl_message_type)255), "?");
}
END_TEST

/* The bytes themselves matter: a second implementation depends on them. */
START_TEST(wire_form)
{
    static const uint8_t expected[] = {
        6,    1 | 2 | 16, 33,   0,                                  /* type, flags, length */
        0xfc, 0xfd,       0xfe, 0xff,                               /* handle */
        0xe8, 0xce,       0x99, 0xab, 0xc6, 0xec, 0x98, 0xb1, 0x61, /* step */
        0x78, 0x77,       0x76, 0x75, 0x74, 0x73, 0x72, 0x71,       /* checksum */
        12,   0,          2,                                        /* dtype, is_dead, rank */
        3,    0x80,       0x01,                                     /* dims */
        0x80, 0x0c,                                                 /* size */
    };
    compose(TL_MESSAGE_DONE);
    message.meta_data.shape.dims[1] = 128;
    message.meta_data.size_bytes = 1536;
    ck_assert_uint_eq(encode(), sizeof(expected));
    ck_assert_mem_eq(buffer, expected, sizeof(expected));
}
END_TEST

START_TEST(greatest_messages_fit)
{
    char key[TL_MESSAGE_KEY_BYTES + 1];
    char text[TL_ERROR_MESSAGE_BYTES];
    memset(key, 'k', sizeof(key));
    key[TL_MESSAGE_KEY_BYTES] = '\0';
    memset(text, 't', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    compose(TL_MESSAGE_REQUEST);
    message.key = key;
    message.meta_data = (struct tl_meta_data){.dtype = TL_U8, .shape = {.rank = TL_MAX_RANK}, .size_bytes = 1};
    for (unsigned i = 0; i < TL_MAX_RANK; i++)
        message.meta_data.shape.dims[i] = 1;
    message.destination.len_bytes = TL_DESCRIPTOR_MAX_BYTES;
    expect_round_trip();
    compose(TL_MESSAGE_ERROR_STATUS);
    message.text = text;
    expect_round_trip();
}
END_TEST

START_TEST(meta_data_of_every_kind)
{
    const struct tl_meta_data kinds[] = {
        {.is_dead = true},
        {.dtype = TL_F64, .size_bytes = 8},
        {.dtype = TL_U8, .shape = {.rank = 3, .dims = {7, 0, 9}}},
        {.dtype = TL_STRING, .shape = {.rank = 1, .dims = {2}}, .size_bytes = 21},
        {.dtype = TL_U8, .shape = {.rank = 1, .dims = {INT64_MAX}}, .size_bytes = INT64_MAX},
        {.dtype = TL_U4, .shape = {.rank = 1, .dims = {3}}, .size_bytes = 2},
    };
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        compose(TL_MESSAGE_META_DATA_UPDATE);
        message.meta_data = kinds[i];
        expect_round_trip();
    }
}
END_TEST

/* Flags that a type does not have are neither sent nor accepted. */
START_TEST(flags)
{
    static const unsigned allowed[] = {0, 0, 255, 1 | 8 | 16, 64,     1 | 2 | 4 | 16,       4,
                                       0, 0, 8,   0,          1 | 16, 1 | 2 | 16 | 32 | 64, 0};
    compose(types[_i]);
    message.has_meta_data = message.has_checksum = message.is_final = message.is_ping = message.is_published = true;
    message.may_map = message.is_copying = message.is_reading = message.is_on_device = true;
    message.is_inline = message.is_remote = message.is_fixed = message.is_file_slow = true;
    uint32_t len_bytes = encode();
    ck_assert_uint_eq(buffer[1], allowed[_i]);
    for (unsigned bit = 0; bit < 8; bit++) {
        if ((allowed[_i] & 1u << bit) != 0) continue;
        buffer[1] = (uint8_t)(allowed[_i] | 1u << bit);
        expect_refused(len_bytes);
    }
}
END_TEST

/* The bytes of an inline value are the rest of its message, and as many as its meta-data says. */
START_TEST(inline_values)
{
    compose(TL_MESSAGE_DONE);
    uint32_t plain_bytes = encode();
    message.is_inline = true;
    uint32_t len_bytes = encode();
    ck_assert_uint_eq(len_bytes, plain_bytes + sizeof(value_bytes));
    ck_assert_mem_eq(buffer + plain_bytes, value_bytes, sizeof(value_bytes));
    expect_round_trip();
    for (uint32_t cut = plain_bytes; cut < len_bytes; cut++) {
        set_len(cut);
        expect_refused(cut);
    }
    set_len(len_bytes + 1);
    expect_refused(len_bytes + 1);
    message.has_meta_data = false;
    len_bytes = encode();
    expect_refused(len_bytes);
    compose(TL_MESSAGE_DONE);
    message.is_inline = true;
    message.meta_data = (struct tl_meta_data){.dtype = TL_F32, .shape = {.rank = 1, .dims = {0}}};
    expect_refused(encode());
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- lengths -- */

START_TEST(truncated)
{
    compose(types[_i]);
    uint32_t len_bytes = encode();
    for (uint32_t cut = 0; cut < len_bytes; cut++) {
        encode();
        expect_refused(cut); /* It claims more than it has. */
        set_len(cut);
        expect_refused(cut);
    }
}
END_TEST

START_TEST(too_long)
{
    compose(types[_i]);
    uint32_t len_bytes = encode();
    expect_refused(len_bytes + 1);
    buffer[len_bytes] = 0;
    set_len(len_bytes + 1);
    expect_refused(len_bytes + 1);
    set_len(len_bytes - 1);
    expect_refused(len_bytes);
    set_len(UINT16_MAX);
    expect_refused(len_bytes);
}
END_TEST

/* ---------------------------------------------------------------------------------------------- hostile values -- */

START_TEST(unknown_types)
{
    for (unsigned type = 0; type < 256; type++) {
        if (type >= TL_MESSAGE_HELLO && type <= TL_MESSAGE_COPIED) continue;
        compose(TL_MESSAGE_CANCEL);
        uint32_t len_bytes = encode();
        buffer[0] = (uint8_t)type;
        expect_refused(len_bytes);
    }
}
END_TEST

#define KEY_PLACE (8 + 3) /* The length of a REQUEST's key is behind three numbers of a byte each. */

START_TEST(keys)
{
    compose(TL_MESSAGE_REQUEST);
    message.key = "";
    expect_refused(encode());
    message.key = "\xff";
    expect_refused(encode());
    message.key = "a\xc3";
    expect_refused(encode());
    message.key = "nul";
    message.number = message.step = message.expected_step = 1;
    message.subscription = 0;
    uint32_t len_bytes = encode();
    ck_assert_uint_eq(buffer[KEY_PLACE], 3 << 4);
    buffer[KEY_PLACE + 2] = '\0';
    expect_refused(len_bytes);
    encode();
    buffer[KEY_PLACE] = 0x7f; /* It reaches into what follows, and beyond. */
    expect_refused(len_bytes);
}
END_TEST

/* With a number, a text, or both; and the meta-data of a request stands in it or is as before. */
START_TEST(numbered_keys)
{
    static const uint32_t key_numbers[] = {0, 1, 31, 32, 4095, 4096, UINT32_MAX};
    for (size_t i = 0; i < sizeof(key_numbers) / sizeof(key_numbers[0]); i++) {
        for (int form = TL_KEY_NEW; form <= TL_KEY_AS_BEFORE; form++) {
            compose(TL_MESSAGE_REQUEST);
            message.key_form = (enum tl_key_form)form;
            message.key_number = key_numbers[i];
            message.priority = (uint8_t)(i % (1 + TL_MAX_PRIORITY));
            message.has_meta_data = form != TL_KEY_AS_BEFORE;
            expect_round_trip();
        }
    }
    message.has_meta_data = true;
    expect_refused(encode());
    /* A number of 33 bits, which has six bytes as the greatest one has. */
    message.has_meta_data = false;
    message.number = message.step = message.expected_step = 1;
    message.subscription = 0;
    uint32_t len_bytes = encode();
    ck_assert_uint_eq(buffer[KEY_PLACE + 5], 1);
    buffer[KEY_PLACE + 5] = 2;
    expect_refused(len_bytes);
}
END_TEST

START_TEST(differences)
{
    static const uint64_t values[] = {0, 1, 63, 64, 1000, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX};
    enum { COUNT = sizeof(values) / sizeof(values[0]) };
    for (unsigned i = 0; i < COUNT * COUNT; i++) {
        uint64_t number = values[i / COUNT], base = values[i % COUNT];
        ck_assert_uint_eq(tl_from_difference(tl_difference(number, base), base), number);
    }
    ck_assert_uint_eq(tl_difference(5, 5), 0);
    ck_assert_uint_eq(tl_difference(6, 5), 2);
    ck_assert_uint_eq(tl_difference(4, 5), 1);
    ck_assert_uint_eq(tl_difference(0, UINT64_MAX), 2);
}
END_TEST

/* A number has one form: up to 64 bits, in as few bytes as it needs. */
START_TEST(numbers)
{
    static const uint64_t values[] = {0, 1, 127, 128, 16383, 16384, UINT32_MAX, INT64_MAX, UINT64_MAX};
    static const unsigned lens[] = {1, 1, 1, 2, 2, 3, 5, 9, 10};
    for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
        compose(TL_MESSAGE_DONE);
        message.has_meta_data = message.has_checksum = false;
        message.step = values[i];
        ck_assert_uint_eq(encode(), 8 + lens[i]);
        expect_round_trip();
    }
    buffer[8 + 9] = 2; /* the 65th bit */
    expect_refused(8 + 10);
    buffer[8 + 9] = 0x81; /* an eleventh byte */
    buffer[8 + 10] = 0;
    set_len(8 + 11);
    expect_refused(8 + 11);
    buffer[8] = 0x81; /* 1 in two bytes */
    buffer[9] = 0;
    set_len(8 + 2);
    expect_refused(8 + 2);
}
END_TEST

/* A REQUEST of a subscription has its number, which is not 0; others have none. */
START_TEST(subscriptions)
{
    compose(TL_MESSAGE_REQUEST);
    message.subscription = 0;
    uint32_t len_bytes = encode();
    ck_assert_uint_eq(buffer[1] & 4, 0);
    expect_round_trip();
    message.subscription = 1;
    ck_assert_uint_eq(encode(), len_bytes + 1);
    expect_round_trip();
    message.number = message.step = message.expected_step = 1;
    len_bytes = encode();
    ck_assert_uint_eq(buffer[KEY_PLACE], 1);
    buffer[KEY_PLACE] = 0;
    expect_refused(len_bytes);
}
END_TEST

/* A key is one byte too long, with everything else right. */
START_TEST(key_too_long)
{
    char key[TL_MESSAGE_KEY_BYTES + 2];
    memset(key, 'k', sizeof(key));
    key[TL_MESSAGE_KEY_BYTES + 1] = '\0';
    compose(TL_MESSAGE_REQUEST);
    message.key = key;
    expect_refused(encode());
    ck_assert_ptr_nonnull(strstr(error.message, "REQUEST"));
}
END_TEST

START_TEST(destinations)
{
    compose(TL_MESSAGE_RE_REQUEST);
    message.destination.len_bytes = TL_DESCRIPTOR_MAX_BYTES;
    uint32_t len_bytes = encode();
    buffer[8] = TL_DESCRIPTOR_MAX_BYTES + 1;
    set_len(len_bytes + 1);
    expect_refused(len_bytes + 1);
    buffer[8] = 255;
    expect_refused(len_bytes + 1);
}
END_TEST

/* A peer that copies on says so for each quarter, which must not be empty. */
START_TEST(laps)
{
    for (unsigned i = 0; i < 2 * (TL_LAP_PARTS + 1); i++) {
        compose(i % 2 == 0 ? TL_MESSAGE_REQUEST : TL_MESSAGE_RE_REQUEST);
        message.lap_bytes = i / 2;
        bool is_refused = message.lap_bytes > 0 && message.lap_bytes < TL_LAP_PARTS;
        ck_assert_int_eq(decode(encode()), is_refused ? TL_INVALID_ARGUMENT : TL_OK);
    }
}
END_TEST

static void expect_meta_data_refused(struct tl_meta_data meta_data)
{
    compose(TL_MESSAGE_META_DATA_UPDATE);
    message.meta_data = meta_data;
    expect_refused(encode());
}

START_TEST(meta_data)
{
    expect_meta_data_refused((struct tl_meta_data){.dtype = TL_DTYPE_INVALID});
    expect_meta_data_refused((struct tl_meta_data){.dtype = TL_DTYPE_COUNT});
    expect_meta_data_refused((struct tl_meta_data){.dtype = (enum tl_dtype)255});
    expect_meta_data_refused((struct tl_meta_data){.dtype = TL_F32, .is_dead = true, .size_bytes = 4});
    expect_meta_data_refused((struct tl_meta_data){.dtype = TL_F32, .size_bytes = 5});
    expect_meta_data_refused(
        (struct tl_meta_data){.dtype = TL_STRING, .shape = {.rank = 1, .dims = {2}}, .size_bytes = 15});
    compose(TL_MESSAGE_META_DATA_UPDATE);
    message.step = 1; /* one byte */
    uint32_t len_bytes = encode();
    buffer[9 + 1] = 2; /* Neither dead nor alive. */
    expect_refused(len_bytes);
    encode();
    buffer[9 + 2] = TL_MAX_RANK + 1;
    expect_refused(len_bytes);
    encode();
    buffer[9 + 2] = 255;
    expect_refused(len_bytes);
}
END_TEST

START_TEST(shapes_that_overflow)
{
    compose(TL_MESSAGE_META_DATA_UPDATE);
    message.meta_data = (struct tl_meta_data){
        .dtype = TL_F64, .shape = {.rank = 3, .dims = {UINT32_MAX, UINT32_MAX, UINT32_MAX}}, .size_bytes = 8};
    uint32_t len_bytes = encode();
    ck_assert_int_eq(tl_message_decode(buffer, len_bytes, &decoded, &error), TL_OUT_OF_RANGE);
    ck_assert_int_eq(error.code, TL_OUT_OF_RANGE);
    message.meta_data.shape.dims[0] = UINT64_MAX;
    len_bytes = encode();
    ck_assert_int_eq(tl_message_decode(buffer, len_bytes, &decoded, NULL), TL_OUT_OF_RANGE);
}
END_TEST

START_TEST(status_codes)
{
    const struct {
        uint32_t sent;
        enum tl_status read;
    } cases[] = {{TL_OK, TL_UNKNOWN},
                 {TL_CANCELLED, TL_CANCELLED},
                 {TL_UNAUTHENTICATED, TL_UNAUTHENTICATED},
                 {TL_UNAUTHENTICATED + 1, TL_UNKNOWN},
                 {UINT32_MAX, TL_UNKNOWN}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        compose(TL_MESSAGE_ERROR_STATUS);
        message.code = (enum tl_status)cases[i].sent;
        ck_assert_int_eq(decode(encode()), TL_OK);
        ck_assert_int_eq(decoded.code, cases[i].read);
    }
}
END_TEST

START_TEST(status_texts)
{
    char text[TL_ERROR_MESSAGE_BYTES + 1];
    memset(text, 't', sizeof(text));
    text[TL_ERROR_MESSAGE_BYTES] = '\0';
    compose(TL_MESSAGE_ERROR_STATUS);
    message.text = text; /* It is longer than a status can be, so it is cut. */
    ck_assert_int_eq(decode(encode()), TL_OK);
    ck_assert_uint_eq(strlen(decoded.text), TL_ERROR_MESSAGE_BYTES - 1);
    message.text = "";
    ck_assert_int_eq(decode(encode()), TL_OK);
    ck_assert_str_eq(decoded.text, "");
    /* The text of an error may hold a path that is not UTF-8. */
    message.text = "jos\xe9/\xf0\x9f";
    uint32_t len_bytes = encode();
    ck_assert_int_eq(decode(len_bytes), TL_OK);
    ck_assert_str_eq(decoded.text, "jos?/??");
    buffer[len_bytes - 1] = 0xe9;
    expect_refused(len_bytes);
    memset(text, 't', sizeof(text));
    message.text = text;
    len_bytes = encode();
    buffer[len_bytes] = 't'; /* It is one byte longer than a status can be. */
    buffer[12] = (uint8_t)TL_ERROR_MESSAGE_BYTES;
    buffer[13] = TL_ERROR_MESSAGE_BYTES >> 8;
    set_len(len_bytes + 1);
    expect_refused(len_bytes + 1);
}
END_TEST

/* A missing field reads as zero, whatever was in the memory before. */
START_TEST(nothing_of_the_former_message_is_left)
{
    compose(TL_MESSAGE_CANCEL);
    ck_assert_int_eq(decode(encode()), TL_OK);
    ck_assert(!decoded.has_meta_data && !decoded.has_checksum && !decoded.is_final && !decoded.is_published);
    ck_assert_uint_eq(decoded.step, 0);
    ck_assert_uint_eq(decoded.number, 0);
    ck_assert_uint_eq(decoded.destination.len_bytes, 0);
    ck_assert_ptr_null(decoded.key);
    ck_assert_ptr_null(decoded.text);
    ck_assert_int_eq(decoded.code, TL_OK);
}
END_TEST

/* ----------------------------------------------------------------------------------------------------- batches -- */

static struct tl_batch batch;
static const uint8_t *found;
static uint32_t found_bytes;

/* Puts a CANCEL, a DONE and a GOODBYE into a batch. Returns its length. */
static uint32_t fill_batch(uint32_t ret_lens[3])
{
    static const enum tl_message_type in_batch[] = {TL_MESSAGE_CANCEL, TL_MESSAGE_DONE, TL_MESSAGE_GOODBYE};
    uint32_t len_bytes = TL_BATCH_HEAD_BYTES;
    tl_batch_encode_head(buffer, 0x01020304);
    for (unsigned i = 0; i < 3; i++) {
        compose(in_batch[i]);
        ret_lens[i] = tl_message_encode(&message, buffer + len_bytes);
        len_bytes += ret_lens[i];
    }
    return len_bytes;
}

START_TEST(batch_of_messages)
{
    uint32_t lens[3];
    uint32_t len_bytes = fill_batch(lens);
    ck_assert_mem_eq(buffer, "\x04\x03\x02\x01", 4);
    ck_assert_int_eq(tl_batch_decode_head(buffer, len_bytes, &batch, NULL), TL_OK);
    ck_assert_uint_eq(batch.consumed, 0x01020304);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert(tl_batch_next(&batch, &found, &found_bytes));
        ck_assert_uint_eq(found_bytes, lens[i]);
        ck_assert_int_eq(tl_message_decode(found, found_bytes, &decoded, NULL), TL_OK);
    }
    ck_assert_int_eq(decoded.type, TL_MESSAGE_GOODBYE);
    ck_assert(!tl_batch_next(&batch, &found, &found_bytes));
}
END_TEST

START_TEST(batch_without_a_message)
{
    tl_batch_encode_head(buffer, 0);
    for (uint32_t len_bytes = 0; len_bytes <= TL_BATCH_HEAD_BYTES; len_bytes++)
        ck_assert_int_eq(tl_batch_decode_head(buffer, len_bytes, &batch, &error), TL_INVALID_ARGUMENT);
}
END_TEST

/* A batch that is cut, or whose last length lies, ends with something that is no message. */
START_TEST(batch_that_ends_in_a_message)
{
    uint32_t lens[3];
    uint32_t len_bytes = fill_batch(lens);
    uint32_t last = len_bytes - lens[2];
    for (uint32_t cut = last + 1; cut <= len_bytes; cut++) {
        if (cut == len_bytes) buffer[last + 2]++; /* its length */
        ck_assert_int_eq(tl_batch_decode_head(buffer, cut, &batch, NULL), TL_OK);
        ck_assert(tl_batch_next(&batch, &found, &found_bytes) && tl_batch_next(&batch, &found, &found_bytes));
        ck_assert(tl_batch_next(&batch, &found, &found_bytes));
        ck_assert_int_eq(tl_message_decode(found, found_bytes, &decoded, NULL), TL_INVALID_ARGUMENT);
        ck_assert(!tl_batch_next(&batch, &found, &found_bytes));
    }
}
END_TEST

/* Of a batch that begins with a large inline value, such values are not copied, and all other bytes are, also where the
 * batch ends too early or a length lies. */
START_TEST(batch_with_large_values)
{
    static uint8_t value[2000], from[3 * sizeof(value)], to[sizeof(from)];
    uint32_t len_bytes = TL_BATCH_HEAD_BYTES, starts[3];
    memset(value, 0x77, sizeof(value));
    tl_batch_encode_head(from, 5);
    for (unsigned i = 0; i < 3; i++) {
        compose(i < 2 ? TL_MESSAGE_DONE : TL_MESSAGE_GOODBYE);
        message.is_inline = i < 2;
        message.data = value;
        message.meta_data = (struct tl_meta_data){
            .dtype = TL_U8, .shape = {.rank = 1, .dims = {sizeof(value)}}, .size_bytes = sizeof(value)};
        starts[i] = len_bytes;
        len_bytes += tl_message_encode(&message, from + len_bytes);
    }
    memset(to, 0xee, sizeof(to));
    tl_batch_copy(to, from, len_bytes);
    ck_assert_int_eq(tl_batch_decode_head(to, len_bytes, &batch, NULL), TL_OK);
    for (unsigned i = 0; i < 3; i++) {
        ck_assert(tl_batch_next(&batch, &found, &found_bytes) && found == to + starts[i]);
        ck_assert_int_eq(tl_message_decode(found, found_bytes, &decoded, NULL), TL_OK);
        if (i == 2) break;
        ck_assert_mem_eq(from + (decoded.data - to), value, sizeof(value));
        ck_assert_uint_eq(found[found_bytes - 1], 0xee);
    }
    ck_assert_int_eq(decoded.type, TL_MESSAGE_GOODBYE);
    for (uint32_t cut = 0; cut < len_bytes; cut++) {
        memset(to, 0xee, sizeof(to));
        tl_batch_copy(to, from, cut);
        ck_assert_uint_eq(to[cut], 0xee);
    }
    from[TL_BATCH_HEAD_BYTES + 3] = 0xff; /* the length of the first message */
    tl_batch_copy(to, from, len_bytes);
    ck_assert_int_eq(tl_batch_decode_head(to, len_bytes, &batch, NULL), TL_OK);
    ck_assert(tl_batch_next(&batch, &found, &found_bytes));
    ck_assert_uint_eq(found_bytes, len_bytes - TL_BATCH_HEAD_BYTES);
    ck_assert_int_eq(tl_message_decode(found, found_bytes, &decoded, NULL), TL_INVALID_ARGUMENT);
}
END_TEST

/* Whatever a REQUEST says of its key can be read before it is decoded; of what is cut, or no REQUEST, nothing is. */
START_TEST(keys_are_peeked)
{
    struct tl_message_key key;
    for (int i = 0; i < TYPE_COUNT; i++) {
        compose(types[i]);
        ck_assert(tl_message_peek_key(buffer, encode(), &key) == (types[i] == TL_MESSAGE_REQUEST));
    }
    for (int form = TL_KEY_TEXT; form <= TL_KEY_AS_BEFORE; form++) {
        bool has_text = form <= TL_KEY_NEW;
        compose(TL_MESSAGE_REQUEST);
        message.key_form = (enum tl_key_form)form;
        message.key_number = 4097;
        message.has_meta_data = false;
        if (_i == 1) message.subscription = 0;
        uint32_t len_bytes = encode();
        ck_assert(tl_message_peek_key(buffer, len_bytes, &key));
        if (form != TL_KEY_TEXT) ck_assert_uint_eq(key.number, 4097);
        ck_assert_uint_eq(key.text_bytes, has_text ? strlen(message.key) : 0);
        ck_assert(has_text ? memcmp(key.text, message.key, key.text_bytes) == 0 : key.text == NULL);
        for (uint32_t cut = 0; cut < len_bytes; cut++) {
            uint8_t *copy = malloc(cut > 0 ? cut : 1); /* so that a sanitizer notices what is read behind it */
            ck_assert_ptr_nonnull(copy);
            memcpy(copy, buffer, cut);
            if (tl_message_peek_key(copy, cut, &key)) ck_assert_uint_gt(cut, 8 + key.text_bytes);
            free(copy);
        }
    }
    compose(TL_MESSAGE_REQUEST);
    message.key = "";
    ck_assert(!tl_message_peek_key(buffer, encode(), &key));
}
END_TEST

/* -------------------------------------------------------------------------------------------------- immediates -- */

START_TEST(handles)
{
    ck_assert_uint_eq(tl_handle_index(tl_handle(TL_MAX_REQUESTS - 1, 3)), TL_MAX_REQUESTS - 1);
    ck_assert_uint_eq(tl_handle(7, 0), 7);
    ck_assert_uint_eq(tl_handle(7, 1u << TL_HANDLE_GENERATION_BITS), tl_handle(7, 0));
    ck_assert_uint_ne(tl_handle(7, 1), tl_handle(7, 2));
    for (uint32_t generation = 0; generation < 1u << TL_HANDLE_GENERATION_BITS; generation++) {
        uint32_t handle = tl_handle(TL_MAX_REQUESTS - 1, generation);
        ck_assert_uint_eq(handle & ~TL_HANDLE_MASK, 0);
        ck_assert_uint_ne(handle | TL_IMMEDIATE_SENDER_COPYING | TL_IMMEDIATE_DONE_FOLLOWS | TL_IMMEDIATE_ON_DEVICE,
                          TL_IMMEDIATE_PROBE);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("message");
    TCase *tcase = tcase_create("message");
    tcase_add_loop_test(tcase, round_trip, 0, TYPE_COUNT);
    tcase_add_loop_test(tcase, flags, 0, TYPE_COUNT);
    tcase_add_loop_test(tcase, truncated, 0, TYPE_COUNT);
    tcase_add_loop_test(tcase, too_long, 0, TYPE_COUNT);
    tcase_add_test(tcase, inline_values);
    tcase_add_test(tcase, names);
    tcase_add_test(tcase, wire_form);
    tcase_add_test(tcase, greatest_messages_fit);
    tcase_add_test(tcase, meta_data_of_every_kind);
    tcase_add_test(tcase, unknown_types);
    tcase_add_test(tcase, keys);
    tcase_add_test(tcase, numbered_keys);
    tcase_add_test(tcase, differences);
    tcase_add_test(tcase, numbers);
    tcase_add_test(tcase, subscriptions);
    tcase_add_test(tcase, key_too_long);
    tcase_add_test(tcase, destinations);
    tcase_add_test(tcase, laps);
    tcase_add_test(tcase, meta_data);
    tcase_add_test(tcase, shapes_that_overflow);
    tcase_add_test(tcase, status_codes);
    tcase_add_test(tcase, status_texts);
    tcase_add_test(tcase, nothing_of_the_former_message_is_left);
    tcase_add_test(tcase, batch_of_messages);
    tcase_add_test(tcase, batch_without_a_message);
    tcase_add_test(tcase, batch_that_ends_in_a_message);
    tcase_add_test(tcase, batch_with_large_values);
    tcase_add_loop_test(tcase, keys_are_peeked, 0, 2);
    tcase_add_test(tcase, handles);
    suite_add_tcase(suite, tcase);
    return run_suite(suite);
}
