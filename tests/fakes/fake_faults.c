// SPDX-License-Identifier: Apache-2.0
/* Faults of a fabric: the first rule that matches decides, then the seed. */
#include <string.h>

#include "base/check.h"
#include "fakes/fake_fabric.h"

/* SplitMix64. */
uint64_t fake_random(struct fake_fabric *fabric, uint64_t below)
{
    fabric->random += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = fabric->random;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    mixed ^= mixed >> 31;
    return below == 0 ? 0 : mixed % below;
}

static bool is_of_operation(enum fake_fault fault)
{
    return fault < FAKE_REGION_FAILURE;
}

/* Returns whether the rule applies; kind 0 stands for a call. */
static bool is_about(const struct fake_rule *rule, const struct tl_provider *provider, const struct tl_queue_pair *pair,
                     unsigned kind)
{
    if (rule->provider != NULL && rule->provider != provider) return false;
    if (rule->pair != NULL && rule->pair != pair) return false;
    return kind == 0 || rule->kinds == 0 || (rule->kinds & kind) != 0;
}

/* Counts a match; returns whether the fault happens at this one. */
static bool is_hit(struct rule_state *state)
{
    uint64_t from = state->rule.from == 0 ? 1 : state->rule.from;
    uint64_t times = state->rule.times == 0 ? 1 : state->rule.times;
    uint64_t number = ++state->match_count;
    return number >= from && (times == FAKE_ALWAYS || number - from < times);
}

static bool happens_by_chance(struct fake_fabric *fabric, enum fake_fault fault)
{
    return fabric->chances[fault] > 0 && fake_random(fabric, 1000000) < fabric->chances[fault];
}

static unsigned count_by_chance(struct fake_fabric *fabric, enum fake_fault fault)
{
    if (fault == FAKE_DELAY) return 1 + (unsigned)fake_random(fabric, 8);
    return fault == FAKE_RNR ? 1 + (unsigned)fake_random(fabric, 3) : 0;
}

void fake_choose_fault(struct fake_pair *pair, struct fake_operation *operation)
{
    struct fake_fabric *fabric = fake_provider_of(pair)->fabric;
    operation->fault = FAKE_FAULT_COUNT;
    for (unsigned i = 0; i < fabric->rule_count; i++) {
        struct rule_state *state = &fabric->rules[i];
        if (!is_of_operation(state->rule.fault)) continue;
        if (!is_about(&state->rule, pair->base.provider, &pair->base, operation->kind)) continue;
        if (operation->len_bytes < state->rule.min_bytes) continue;
        if (!is_hit(state) || operation->fault != FAKE_FAULT_COUNT) continue;
        operation->fault = state->rule.fault;
        operation->fault_count = state->rule.count;
    }
    for (enum fake_fault fault = 0; is_of_operation(fault) && operation->fault == FAKE_FAULT_COUNT; fault++) {
        if (!happens_by_chance(fabric, fault)) continue;
        operation->fault = fault;
        operation->fault_count = count_by_chance(fabric, fault);
    }
}

bool fake_call_fails(struct fake_fabric *fabric, enum fake_fault fault, const struct tl_provider *provider,
                     const struct tl_queue_pair *pair)
{
    bool fails = false;
    for (unsigned i = 0; i < fabric->rule_count; i++) {
        struct rule_state *state = &fabric->rules[i];
        if (state->rule.fault == fault && is_about(&state->rule, provider, pair, 0)) fails |= is_hit(state);
    }
    return fails || happens_by_chance(fabric, fault);
}

void fake_fabric_add_rule(struct fake_fabric *fabric, const struct fake_rule *rule)
{
    TL_CHECK(rule->fault < FAKE_FAULT_COUNT);
    TL_CHECK(pthread_mutex_lock(&fabric->mutex) == 0);
    TL_CHECK(fabric->rule_count < FAKE_MAX_RULES);
    fabric->rules[fabric->rule_count++] = (struct rule_state){.rule = *rule};
    TL_CHECK(pthread_mutex_unlock(&fabric->mutex) == 0);
}

void fake_forget_rules(struct fake_fabric *fabric, const struct tl_provider *provider)
{
    unsigned kept = 0;
    for (unsigned i = 0; i < fabric->rule_count; i++) {
        if (fabric->rules[i].rule.provider != provider) fabric->rules[kept++] = fabric->rules[i];
    }
    fabric->rule_count = kept;
}

void fake_fabric_clear_rules(struct fake_fabric *fabric)
{
    TL_CHECK(pthread_mutex_lock(&fabric->mutex) == 0);
    fabric->rule_count = 0;
    memset(fabric->chances, 0, sizeof(fabric->chances));
    TL_CHECK(pthread_mutex_unlock(&fabric->mutex) == 0);
}

void fake_fabric_set_chance(struct fake_fabric *fabric, enum fake_fault fault, unsigned per_million)
{
    TL_CHECK(fault < FAKE_FAULT_COUNT && per_million <= 1000000);
    TL_CHECK(pthread_mutex_lock(&fabric->mutex) == 0);
    fabric->chances[fault] = per_million;
    TL_CHECK(pthread_mutex_unlock(&fabric->mutex) == 0);
}

static void fail_provider(struct fake_provider *provider, bool is_gone, const char *why)
{
    TL_CHECK(pthread_mutex_lock(&provider->fabric->mutex) == 0);
    provider->is_gone |= is_gone;
    fake_break_all(provider, why);
    TL_CHECK(pthread_mutex_unlock(&provider->fabric->mutex) == 0);
}

void fake_provider_overrun(struct tl_provider *provider)
{
    fail_provider((struct fake_provider *)provider, false, "the completion queue has overrun");
}

void fake_provider_remove(struct tl_provider *provider)
{
    fail_provider((struct fake_provider *)provider, true, "the device is gone");
}
