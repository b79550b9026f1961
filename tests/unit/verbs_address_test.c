// SPDX-License-Identifier: Apache-2.0
/* The bytes of the verbs provider that go over the wire: addresses and descriptors. */
#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "dataplane/verbs/verbs_internal.h"
#include "fakes/run_suite.h"

static const struct verbs_address roce = {
    .link_layer = IBV_LINK_LAYER_ETHERNET,
    .gid_type = IBV_GID_TYPE_ROCE_V2,
    .mtu = IBV_MTU_4096,
    .keys = TL_KEYS_WINDOW,
    .initiator_depth = 1,
    .responder_depth = 2,
    .timeout = 14,
    .retry_count = 6,
    .lid = 0x1234,
    .number = 0x56789a,
    .psn = 0xbcdef0,
    .gid = {[10] = 0xff, [11] = 0xff, 10, 1, 2, 3},
    .device = "mlx5_0:1",
};

static const uint8_t bytes_of_roce[38 + 32] = {
    'T', 'L', 'V', 1, 2, 2, 5, 0, 1, 2,    14,   6,  0x34, 0x12, 0x9a, 0x78, 0x56, 0,   0xf0, 0xde, 0xbc, 0,   0,
    0,   0,   0,   0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1,    2,    3,    'm',  'l',  'x', '5',  '_',  '0',  ':', '1'};

START_TEST(address_is_these_bytes)
{
    struct tl_pair_address bytes;
    struct verbs_address read;
    verbs_address_write(&roce, &bytes);
    ck_assert_uint_eq(bytes.len_bytes, sizeof(bytes_of_roce));
    ck_assert_mem_eq(bytes.bytes, bytes_of_roce, sizeof(bytes_of_roce));
    ck_assert_int_eq(verbs_address_read(&bytes, &read, NULL), TL_OK);
    ck_assert_mem_eq(read.gid, roce.gid, 16);
    ck_assert_uint_eq(read.number, roce.number);
    ck_assert_uint_eq(read.psn, roce.psn);
    ck_assert_uint_eq(read.lid, roce.lid);
    ck_assert_uint_eq(read.responder_depth, roce.responder_depth);
    ck_assert_str_eq(read.device, roce.device);
}
END_TEST

static enum tl_status read_changed(size_t at, uint8_t value, uint32_t len_bytes)
{
    struct tl_pair_address bytes;
    struct verbs_address read;
    struct tl_error error = {0};
    verbs_address_write(&roce, &bytes);
    bytes.bytes[at] = value;
    bytes.len_bytes = len_bytes;
    enum tl_status status = verbs_address_read(&bytes, &read, &error);
    ck_assert_int_eq(error.code, status);
    return status;
}

START_TEST(what_is_no_address)
{
    const uint32_t len = sizeof(bytes_of_roce);
    for (uint32_t other = 0; other < len; other++)
        ck_assert_int_eq(read_changed(0, 'T', other), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(read_changed(0, 'T', len + 1), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(read_changed(0, 'T', TL_PAIR_ADDRESS_MAX_BYTES + 1), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(read_changed(0, 'T', UINT32_MAX), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(read_changed(0, 'S', len), TL_INVALID_ARGUMENT);
}
END_TEST

START_TEST(another_version)
{
    ck_assert_int_eq(read_changed(3, 2, sizeof(bytes_of_roce)), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(read_changed(3, 2, 100), TL_FAILED_PRECONDITION);
    ck_assert_int_eq(read_changed(3, 0, sizeof(bytes_of_roce)), TL_FAILED_PRECONDITION);
}
END_TEST

START_TEST(impossible_values)
{
    const uint8_t changes[][2] = {{4, 0},   {4, 1},   {4, 3},  {5, 0},  {5, 3},  {6, 0},  {6, 6},     {7, 2},
                                  {7, 255}, {10, 32}, {11, 8}, {17, 1}, {21, 1}, {38, 0}, {39, '\n'}, {40, 200}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(changes); i++) {
        ck_assert_msg(read_changed(changes[i][0], changes[i][1], sizeof(bytes_of_roce)) == TL_INVALID_ARGUMENT,
                      "byte %u is %u", changes[i][0], changes[i][1]);
    }
}
END_TEST

START_TEST(a_name_without_an_end)
{
    struct tl_pair_address bytes;
    struct verbs_address read;
    verbs_address_write(&roce, &bytes);
    memset(bytes.bytes + 38, 'x', VERBS_ADDRESS_NAME_BYTES - 1);
    ck_assert_int_eq(verbs_address_read(&bytes, &read, NULL), TL_OK);
    bytes.bytes[38 + VERBS_ADDRESS_NAME_BYTES - 1] = 'x';
    ck_assert_int_eq(verbs_address_read(&bytes, &read, NULL), TL_INVALID_ARGUMENT);
}
END_TEST

static enum tl_status read_of(struct verbs_address theirs)
{
    struct tl_pair_address bytes;
    verbs_address_write(&theirs, &bytes);
    return verbs_address_read(&bytes, &theirs, NULL);
}

START_TEST(peers_without_address_or_number)
{
    struct verbs_address theirs = roce;
    memset(theirs.gid, 0, sizeof(theirs.gid));
    ck_assert_int_eq(read_of(theirs), TL_INVALID_ARGUMENT);
    theirs.link_layer = IBV_LINK_LAYER_INFINIBAND;
    theirs.gid_type = IBV_GID_TYPE_IB;
    ck_assert_int_eq(read_of(theirs), TL_OK);
    theirs.lid = 0;
    ck_assert_int_eq(read_of(theirs), TL_INVALID_ARGUMENT);
    theirs = roce;
    for (theirs.number = 0; theirs.number < 2; theirs.number++)
        ck_assert_int_eq(read_of(theirs), TL_INVALID_ARGUMENT);
    ck_assert_int_eq(read_of(theirs), TL_OK);
}
END_TEST

START_TEST(peers_that_do_not_fit)
{
    struct verbs_address theirs = roce;
    struct tl_error error;
    ck_assert_int_eq(verbs_address_match(&roce, &theirs, NULL), TL_OK);
    theirs.mtu = IBV_MTU_1024;
    theirs.keys = TL_KEYS_REGION;
    ck_assert_int_eq(verbs_address_match(&roce, &theirs, NULL), TL_OK);
    theirs.gid_type = IBV_GID_TYPE_ROCE_V1;
    ck_assert_int_eq(verbs_address_match(&roce, &theirs, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "RoCE v1"));
    theirs = roce;
    theirs.gid[0] = 0xfd;
    ck_assert_int_eq(verbs_address_match(&roce, &theirs, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "IPv6"));
    theirs = roce;
    theirs.link_layer = IBV_LINK_LAYER_INFINIBAND;
    ck_assert_int_eq(verbs_address_match(&roce, &theirs, &error), TL_FAILED_PRECONDITION);
    ck_assert_ptr_nonnull(strstr(error.message, "InfiniBand"));
}
END_TEST

/* Either side may have either of two values. */
START_TEST(both_take_what_is_less)
{
    struct verbs_address a = roce, b = roce;
    a.mtu = IBV_MTU_1024;
    a.timeout = 14;
    a.retry_count = 3;
    a.initiator_depth = 1;
    a.responder_depth = 16;
    b.mtu = IBV_MTU_4096;
    b.timeout = 18;
    b.retry_count = 7;
    b.initiator_depth = 4;
    b.responder_depth = 8;
    struct verbs_terms of_a = verbs_address_agree(&a, &b), of_b = verbs_address_agree(&b, &a);
    ck_assert_uint_eq(of_a.mtu, IBV_MTU_1024);
    ck_assert_uint_eq(of_a.timeout, 14);
    ck_assert_uint_eq(of_a.retry_count, 3);
    ck_assert_uint_eq(of_a.initiator_depth, 1);
    ck_assert_uint_eq(of_a.responder_depth, 4);
    ck_assert_uint_eq(of_b.mtu, of_a.mtu);
    ck_assert_uint_eq(of_b.timeout, of_a.timeout);
    ck_assert_uint_eq(of_b.retry_count, of_a.retry_count);
    ck_assert_uint_eq(of_b.initiator_depth, of_a.responder_depth);
    ck_assert_uint_eq(of_b.responder_depth, of_a.initiator_depth);
    /* 0 stands for the longest time. */
    a.timeout = 0;
    ck_assert_uint_eq(verbs_address_agree(&a, &b).timeout, 18);
    ck_assert_uint_eq(verbs_address_agree(&b, &a).timeout, 18);
    b.timeout = 0;
    ck_assert_uint_eq(verbs_address_agree(&a, &b).timeout, 0);
}
END_TEST

START_TEST(descriptor_is_these_bytes)
{
    static const uint8_t bytes[] = {8,   7,   6,    5,    4,    3,    2,    1,    0xd,  0xc,
                                    0xb, 0xa, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11};
    struct tl_descriptor descriptor;
    uint64_t address, len;
    uint32_t rkey;
    verbs_descriptor_write(0x0102030405060708, 0x0a0b0c0d, 0x1112131415161718, &descriptor);
    ck_assert_uint_eq(descriptor.len_bytes, sizeof(bytes));
    ck_assert_mem_eq(descriptor.bytes, bytes, sizeof(bytes));
    ck_assert(verbs_descriptor_read(&descriptor, &address, &rkey, &len));
    ck_assert_uint_eq(address, 0x0102030405060708);
    ck_assert_uint_eq(rkey, 0x0a0b0c0d);
    ck_assert_uint_eq(len, 0x1112131415161718);
    for (unsigned other = 0; other < 256; other++) {
        descriptor.len_bytes = (uint8_t)other;
        ck_assert_int_eq(verbs_descriptor_read(&descriptor, &address, &rkey, &len), other == sizeof(bytes));
    }
}
END_TEST

START_TEST(ids_come_back)
{
    const struct verbs_id ids[] = {{0, 0, VERBS_SEND, 0},
                                   {0xffffff, 0xffff, VERBS_RECEIVE, 0x7fffff},
                                   {1, 2, VERBS_RECEIVE, 3},
                                   {0xffffff, 0, VERBS_SEND, 0x7fffff}};
    for (size_t i = 0; i < TL_ARRAY_COUNT(ids); i++) {
        struct verbs_id id = verbs_id_unpack(verbs_id_pack(ids[i]));
        ck_assert_uint_eq(id.generation, ids[i].generation);
        ck_assert_uint_eq(id.pair_index, ids[i].pair_index);
        ck_assert_uint_eq(id.kind, ids[i].kind);
        ck_assert_uint_eq(id.index, ids[i].index);
    }
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("verbs_address");
    TCase *tests = tcase_create("bytes");
    tcase_add_test(tests, address_is_these_bytes);
    tcase_add_test(tests, what_is_no_address);
    tcase_add_test(tests, another_version);
    tcase_add_test(tests, impossible_values);
    tcase_add_test(tests, a_name_without_an_end);
    tcase_add_test(tests, peers_without_address_or_number);
    tcase_add_test(tests, peers_that_do_not_fit);
    tcase_add_test(tests, both_take_what_is_less);
    tcase_add_test(tests, descriptor_is_these_bytes);
    tcase_add_test(tests, ids_come_back);
    suite_add_tcase(suite, tests);
    return run_suite(suite);
}
