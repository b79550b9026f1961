// SPDX-License-Identifier: Apache-2.0
/* The calls that have one request: Identify, Check, List, Withdraw. */
#include "control/client.h"

#include "control/client_call.h"
#include "control/internal.h"
#include "control/responses.h"
#include "grpc/health/v1/health.pb-c.h"
#include "tensorlane/v1/cluster.pb-c.h"

uint32_t tl_client_protocol_version(void)
{
    return TL_PROTOCOL_VERSION;
}

static enum tl_status take_description(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                       struct tl_error *ret_error)
{
    return tl_identify_response_read(message, arena, context, ret_error);
}

enum tl_status tl_client_identify(const struct tl_call_options *options, struct tl_description *ret_description,
                                  enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    static const struct tl_client_method method = {
        .name = "/tensorlane.v1.Cluster/Identify", .is_single = true, .take = take_description};
    Tensorlane__V1__IdentifyRequest request = TENSORLANE__V1__IDENTIFY_REQUEST__INIT;
    struct tl_description description = {0};
    enum tl_status status = tl_client_ask(options, &method, &request.base, &description, ret_stage, ret_error);
    if (status == TL_OK) {
        *ret_description = description;
    } else {
        tl_description_fini(&description);
    }
    return status;
}

static enum tl_status take_health(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                  struct tl_error *ret_error)
{
    return tl_health_response_read(message, arena, context, ret_error);
}

enum tl_status tl_client_check_health(const struct tl_call_options *options, const char *service, int *ret_health,
                                      enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    static const struct tl_client_method method = {
        .name = "/grpc.health.v1.Health/Check", .is_single = true, .take = take_health};
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)service;
    int health = 0;
    enum tl_status status = tl_client_ask(options, &method, &request.base, &health, ret_stage, ret_error);
    if (status == TL_OK) *ret_health = health;
    return status;
}

static enum tl_status take_listing(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                   struct tl_error *ret_error)
{
    return tl_list_response_read(message, arena, context, ret_error);
}

const struct tl_client_method tl_client_list_method = {.name = "/tensorlane.v1.Transfer/List", .take = take_listing};

enum tl_status tl_client_list(const struct tl_call_options *options, const char *pattern,
                              struct tl_listing *ret_listing, enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    Tensorlane__V1__ListRequest request = TENSORLANE__V1__LIST_REQUEST__INIT;
    request.pattern = (char *)pattern;
    struct tl_listing_builder builder = {0};
    enum tl_status status =
        tl_client_ask(options, &tl_client_list_method, &request.base, &builder, ret_stage, ret_error);
    if (status == TL_OK) {
        tl_listing_builder_finish(&builder, ret_listing);
    } else {
        tl_listing_fini(&builder.listing);
    }
    return status;
}

static enum tl_status take_count(void *context, grpc_byte_buffer *message, struct tl_wire_arena *arena,
                                 struct tl_error *ret_error)
{
    return tl_withdraw_response_read(message, arena, context, ret_error);
}

const struct tl_client_method tl_client_withdraw_method = {
    .name = "/tensorlane.v1.Transfer/Withdraw", .is_single = true, .take = take_count};

enum tl_status tl_client_withdraw(const struct tl_call_options *options, const char *pattern, uint64_t *ret_count,
                                  enum tl_call_stage *ret_stage, struct tl_error *ret_error)
{
    Tensorlane__V1__WithdrawRequest request = TENSORLANE__V1__WITHDRAW_REQUEST__INIT;
    request.pattern = (char *)pattern;
    uint64_t count = 0;
    enum tl_status status =
        tl_client_ask(options, &tl_client_withdraw_method, &request.base, &count, ret_stage, ret_error);
    if (status == TL_OK) *ret_count = count;
    return status;
}
