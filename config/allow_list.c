// SPDX-License-Identifier: Apache-2.0
/*
 * Reads the rules of "security.allow".
 *
 * Happy path: each rule is an object with two lists: "who" has roles, "what" has actions. Roles are kept as they were
 * written and as what they are compared with. Failure modes: a rule without one of the lists, an empty list, and a word
 * that is no role or no action are errors at their places.
 */
#include "config/allow_list.h"

#include <inttypes.h>
#include <string.h>

#include "base/check.h"
#include "base/error.h"
#include "config/cluster.h"
#include "config/quote.h"
#include "config/setting_value.h"

#define JOB "job:"
#define TASK "task:"
#define TRUST_DOMAIN "trust-domain:"
#define SPIFFE "spiffe://"
#define MAX_SPIFFE_BYTES 2048
#define MAX_DNS_BYTES 255
#define MAX_LABEL_BYTES 63
#define MAX_NAMES 256

static const struct tl_role member_role = {.kind = TL_ROLE_MEMBER, .word = "member"};
/* What stays of a role that is wrong. */
static const struct tl_role wrong_role = {.kind = TL_ROLE_CLIENT, .word = "", .name = ""};
static const struct tl_allow_rule default_rule = {
    .roles = &member_role,
    .role_count = 1,
    .actions = 1U << TL_ACTION_READ | 1U << TL_ACTION_LIST | 1U << TL_ACTION_PUSH | 1U << TL_ACTION_PEERS,
};

void tl_allow_list_set_default(struct tl_security_settings *settings)
{
    settings->allow = &default_rule;
    settings->allow_count = 1;
    settings->foreign_names = "";
}

/* ------------------------------------------------------------------------------------------------------- roles -- */

/* True when the text consists of letters, digits and the other characters, at least one. */
static bool has_only(const char *text, size_t len_bytes, const char *others)
{
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    for (size_t i = 0; i < len_bytes; i++) {
        if (!strchr(plain, text[i]) && !strchr(others, text[i])) return false;
    }
    return len_bytes > 0;
}

/* "other.org", in lower case, as certificates have it. */
static bool is_trust_domain(const char *text, size_t len_bytes)
{
    const char *end = text + len_bytes;
    if (len_bytes >= MAX_DNS_BYTES - strlen(SPIFFE)) return false;
    for (const char *label = text;; label++) {
        size_t len = strcspn(label, ".");
        if (len > (size_t)(end - label)) len = (size_t)(end - label);
        if (len > MAX_LABEL_BYTES || !has_only(label, len, "_-")) return false;
        for (size_t i = 0; i < len; i++)
            if (label[i] >= 'A' && label[i] <= 'Z') return false;
        label += len;
        if (label == end) return true;
    }
}

/* "spiffe://DOMAIN/PATH", as a certificate may have it. */
static bool is_spiffe_name(const char *word)
{
    if (strncmp(word, SPIFFE, strlen(SPIFFE)) != 0 || strlen(word) > MAX_SPIFFE_BYTES) return false;
    const char *domain = word + strlen(SPIFFE), *part = domain + strcspn(domain, "/");
    if (!is_trust_domain(domain, (size_t)(part - domain)) || *part == '\0') return false;
    while (*part == '/') {
        size_t len = strcspn(++part, "/");
        if (!has_only(part, len, "._-") || (len <= 2 && strspn(part, ".") == len)) return false;
        part += len;
    }
    return true;
}

/* "ann.example.org", or "ann." with a dot at its end. */
static bool is_dns_name(const char *word)
{
    if (strlen(word) > MAX_DNS_BYTES || !strchr(word, '.')) return false;
    for (const char *label = word;; label++) {
        size_t len = strcspn(label, ".");
        if (len > MAX_LABEL_BYTES || !has_only(label, len, "_-")) return false;
        label += len;
        if (label[0] == '\0' || label[1] == '\0') return true;
    }
}

/* Splits "JOB:INDEX". */
static bool split_task(const char *text, char ret_job[TL_JOB_NAME_BYTES], uint32_t *ret_index)
{
    size_t len = strcspn(text, ":");
    if (text[len] != ':' || len >= TL_JOB_NAME_BYTES) return false;
    *(char *)mempcpy(ret_job, text, len) = '\0';
    return tl_cluster_is_job_name(ret_job) && tl_cluster_parse_index(text + len + 1, ret_index);
}

/* What kind of role the word is. False: it is none. */
static bool find_kind(const char *word, enum tl_role_kind *ret_kind)
{
    char job[TL_JOB_NAME_BYTES];
    uint32_t index;
    *ret_kind = strcmp(word, "any") == 0                                 ? TL_ROLE_ANY
                : strcmp(word, "member") == 0                            ? TL_ROLE_MEMBER
                : strncmp(word, JOB, strlen(JOB)) == 0                   ? TL_ROLE_JOB
                : strncmp(word, TASK, strlen(TASK)) == 0                 ? TL_ROLE_TASK
                : strncmp(word, TRUST_DOMAIN, strlen(TRUST_DOMAIN)) == 0 ? TL_ROLE_TRUST_DOMAIN
                                                                         : TL_ROLE_CLIENT;
    switch (*ret_kind) {
    case TL_ROLE_JOB:
        return tl_cluster_is_job_name(word + strlen(JOB));
    case TL_ROLE_TASK:
        return split_task(word + strlen(TASK), job, &index);
    case TL_ROLE_TRUST_DOMAIN:
        return is_trust_domain(word + strlen(TRUST_DOMAIN), strlen(word) - strlen(TRUST_DOMAIN));
    case TL_ROLE_CLIENT:
        return is_spiffe_name(word) || is_dns_name(word);
    case TL_ROLE_ANY:
    case TL_ROLE_MEMBER:
        break;
    }
    return true;
}

/* What a caller's name is compared with. NULL: no memory. */
static const char *make_name(const struct tl_role *role, struct tl_arena *arena)
{
    char job[TL_JOB_NAME_BYTES];
    size_t len = strlen(role->word);
    uint32_t index;
    if (role->kind == TL_ROLE_JOB) return tl_arena_format(arena, "/job:%s/task:", role->word + strlen(JOB));
    if (role->kind == TL_ROLE_TASK && split_task(role->word + strlen(TASK), job, &index))
        return tl_cluster_task_name(arena, job, index);
    if (role->kind == TL_ROLE_TRUST_DOMAIN)
        return tl_arena_format(arena, SPIFFE "%s/", role->word + strlen(TRUST_DOMAIN));
    /* A DNS name may end in a dot; to a URI that is another name. */
    bool is_uri = strncmp(role->word, SPIFFE, strlen(SPIFFE)) == 0;
    bool is_absolute = role->kind == TL_ROLE_CLIENT && !is_uri && role->word[len - 1] == '.';
    return tl_arena_format(arena, "%.*s", (int)(is_absolute ? len - 1 : len), role->word);
}

/* False when the word looks like the name of a task's certificate, and no certificate has it. */
static bool is_certified(const char *word)
{
    const char *path = strncmp(word, SPIFFE, strlen(SPIFFE)) == 0 ? strchr(word + strlen(SPIFFE), '/') : NULL;
    uint32_t index;
    if (!path || strncmp(path, "/job/", 5) != 0) return true;
    path += 5;
    path += strcspn(path, "/");
    return strncmp(path, "/task/", 6) == 0 && tl_cluster_parse_index(path + 6, &index);
}

static enum tl_status read_role(const struct tl_json_value *value, struct tl_arena *arena, struct tl_role *ret_role,
                                struct tl_error *ret_error)
{
    static const char *const roles[] = {
        "any", "member", "job:JOB", "task:JOB:INDEX", "trust-domain:NAME", "spiffe://DOMAIN/PATH", "NAME.DOMAIN"};
    char quoted[TL_QUOTE_BYTES], suggestion[TL_ERROR_MESSAGE_BYTES / 2];
    struct tl_role role;
    enum tl_status status = tl_json_expect(value, JSON_STRING, "a role such as \"job:worker\"", ret_error);
    if (status != TL_OK) return status;
    const char *word = json_string_value(value->json);
    if (!find_kind(word, &role.kind)) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%s is no role; %s", tl_quote(word, quoted),
                            tl_json_suggest(word, roles, TL_ARRAY_COUNT(roles), suggestion, sizeof(suggestion)));
    }
    if (role.kind == TL_ROLE_CLIENT && !is_certified(word)) {
        return tl_json_fail(
            value, TL_INVALID_ARGUMENT, ret_error,
            "%s is no name of a task; write spiffe://DOMAIN/job/JOB/task/INDEX for one of another trust "
            "domain, and \"task:JOB:INDEX\" for one of this cluster",
            tl_quote(word, quoted));
    }
    role.node = value->node;
    role.word = tl_arena_format(arena, "%s", word);
    role.name = role.word ? make_name(&role, arena) : NULL;
    if (!role.name) return tl_json_no_memory(value->doc->source, ret_error);
    *ret_role = role;
    return TL_OK;
}

/* ------------------------------------------------------------------------------------------------------- rules -- */

static enum tl_status expect_list(const struct tl_json_value *value, const char *what, size_t max_count,
                                  struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(value, JSON_ARRAY, what, ret_error);
    if (status != TL_OK) return status;
    size_t count = json_array_size(value->json);
    if (count == 0) return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "an empty list; remove the rule");
    if (count <= max_count) return TL_OK;
    return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%zu entries are too many; there may be %zu", count,
                        max_count);
}

static enum tl_status read_who(const struct tl_json_value *value, struct tl_arena *arena, struct tl_allow_rule *rule,
                               struct tl_error *ret_error)
{
    enum tl_status status = expect_list(value, "a list of roles", TL_MAX_ALLOW_ROLES, ret_error);
    if (status != TL_OK) return status;
    struct tl_role *roles = tl_arena_alloc_array(arena, json_array_size(value->json), sizeof(*roles));
    if (!roles) return tl_json_no_memory(value->doc->source, ret_error);
    struct tl_json_value element;
    rule->roles = roles;
    TL_JSON_FOREACH(value, element)
    {
        roles[element.index] = wrong_role;
        status = read_role(&element, arena, &roles[rule->role_count++], ret_error);
        status = tl_json_collect(value->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

static enum tl_status read_action(const struct tl_json_value *value, unsigned *actions, struct tl_error *ret_error)
{
    char quoted[TL_QUOTE_BYTES], suggestion[TL_ERROR_MESSAGE_BYTES / 2];
    enum tl_status status = tl_json_expect(value, JSON_STRING, "an action such as \"read\"", ret_error);
    if (status != TL_OK) return status;
    const char *word = json_string_value(value->json);
    for (unsigned i = 0; i < TL_ACTION_COUNT; i++) {
        if (strcmp(tl_action_names[i], word) != 0) continue;
        *actions |= 1U << i;
        return TL_OK;
    }
    return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%s is no action; %s", tl_quote(word, quoted),
                        tl_json_suggest(word, tl_action_names, TL_ACTION_COUNT, suggestion, sizeof(suggestion)));
}

static enum tl_status read_what(const struct tl_json_value *value, struct tl_allow_rule *rule,
                                struct tl_error *ret_error)
{
    enum tl_status status = expect_list(value, "a list of actions", TL_MAX_ALLOW_ROLES, ret_error);
    if (status != TL_OK) return status;
    struct tl_json_value element;
    TL_JSON_FOREACH(value, element)
    {
        status = tl_json_collect(value->doc, read_action(&element, &rule->actions, ret_error), ret_error);
        if (status != TL_OK) return status;
    }
    return TL_OK;
}

static enum tl_status read_rule(const struct tl_json_value *value, struct tl_arena *arena, struct tl_allow_rule *rule,
                                struct tl_error *ret_error)
{
    static const char *const names[] = {"who", "what"};
    enum tl_status status = tl_json_expect(value, JSON_OBJECT, "a rule, {\"who\": [...], \"what\": [...]}", ret_error);
    if (status != TL_OK) return status;
    struct tl_json_value member;
    TL_JSON_FOREACH(value, member)
    {
        status = strcmp(member.key, "who") == 0 ? read_who(&member, arena, rule, ret_error)
                 : strcmp(member.key, "what") == 0
                     ? read_what(&member, rule, ret_error)
                     : tl_json_fail_unknown_key(&member, "member of a rule", names, TL_ARRAY_COUNT(names), ret_error);
        status = tl_json_collect(value->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    for (size_t i = 0; i < TL_ARRAY_COUNT(names); i++) {
        if (tl_json_member(value, names[i], &member)) continue;
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error,
                            "\"%s\" is missing; write {\"who\": [\"member\"], \"what\": [\"read\"]}", names[i]);
    }
    return TL_OK;
}

/* The trust domain or the URI that a role names; "": neither. */
static const char *foreign_name(const struct tl_role *role)
{
    if (role->kind == TL_ROLE_TRUST_DOMAIN) return role->word + strlen(TRUST_DOMAIN);
    return strncmp(role->name, SPIFFE, strlen(SPIFFE)) == 0 ? role->name : "";
}

/* Lists what the rules name, with a blank between two. NULL: no memory. */
static const char *list_foreign_names(const struct tl_allow_rule *rules, size_t count, struct tl_arena *arena)
{
    size_t size_bytes = 1;
    for (size_t i = 0; i < count; i++)
        for (size_t j = 0; j < rules[i].role_count; j++)
            size_bytes += strlen(foreign_name(&rules[i].roles[j])) + 1;
    char *list = tl_arena_alloc(arena, size_bytes), *end = list;
    if (!list) return NULL;
    list[0] = '\0';
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < rules[i].role_count; j++) {
            const char *name = foreign_name(&rules[i].roles[j]);
            if (end != list && name[0] != '\0') *end++ = ' ';
            end = stpcpy(end, name);
        }
    }
    return list;
}

enum tl_status tl_allow_list_read(const struct tl_json_value *value, struct tl_arena *arena,
                                  struct tl_security_settings *settings, struct tl_error *ret_error)
{
    enum tl_status status = tl_json_expect(value, JSON_ARRAY, "a list of rules", ret_error);
    if (status != TL_OK) return status;
    size_t count = json_array_size(value->json);
    if (count > TL_MAX_ALLOW_RULES) {
        return tl_json_fail(value, TL_INVALID_ARGUMENT, ret_error, "%zu rules are too many; there may be %d", count,
                            TL_MAX_ALLOW_RULES);
    }
    struct tl_allow_rule *rules = tl_arena_alloc_array(arena, count, sizeof(*rules));
    if (!rules) return tl_json_no_memory(value->doc->source, ret_error);
    struct tl_json_value element;
    TL_JSON_FOREACH(value, element)
    {
        status = read_rule(&element, arena, &rules[element.index], ret_error);
        status = tl_json_collect(value->doc, status, ret_error);
        if (status != TL_OK) return status;
    }
    settings->allow = rules;
    settings->allow_count = count;
    settings->foreign_names = list_foreign_names(rules, count, arena);
    if (!settings->foreign_names) return tl_json_no_memory(value->doc->source, ret_error);
    return TL_OK;
}

/* -------------------------------------------------------------------------------------------------------- text -- */

/* NULL: no memory. */
static json_t *make_rule(const struct tl_allow_rule *rule)
{
    json_t *who = json_array(), *what = json_array(), *object = json_object();
    bool is_complete = who && what && object;
    for (size_t i = 0; is_complete && i < rule->role_count; i++)
        is_complete = json_array_append_new(who, json_string(rule->roles[i].word)) == 0;
    for (unsigned i = 0; is_complete && i < TL_ACTION_COUNT; i++) {
        if ((rule->actions & 1U << i) == 0) continue;
        is_complete = json_array_append_new(what, json_string(tl_action_names[i])) == 0;
    }
    is_complete = is_complete && json_object_set(object, "who", who) == 0 && json_object_set(object, "what", what) == 0;
    json_decref(who);
    json_decref(what);
    if (is_complete) return object;
    json_decref(object);
    return NULL;
}

const char *tl_allow_list_format(const struct tl_security_settings *settings, struct tl_arena *arena)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < settings->allow_count; i++) {
        if (json_array_append_new(list, make_rule(&settings->allow[i])) == 0) continue;
        json_decref(list);
        return NULL;
    }
    return tl_json_dump(list, arena);
}

/* ------------------------------------------------------------------------------------- with the rest of the file -- */

static enum tl_status check_role(const struct tl_role *role, struct tl_json_doc *doc, struct tl_config_task *tasks,
                                 size_t task_count, struct tl_error *ret_error)
{
    char job[TL_JOB_NAME_BYTES] = "", text[TL_ERROR_MESSAGE_BYTES / 2];
    const struct tl_json_value value = {.doc = doc, .node = role->node};
    const char *names[MAX_NAMES];
    size_t first, end;
    uint32_t index = 0;
    if (role->kind == TL_ROLE_JOB) {
        strcpy(job, role->word + strlen(JOB)); /* its length was checked */
    } else if (role->kind != TL_ROLE_TASK || !split_task(role->word + strlen(TASK), job, &index)) {
        return TL_OK;
    }
    if (!tl_cluster_find_job(tasks, task_count, job, &first, &end)) {
        size_t count = tl_cluster_job_names(tasks, task_count, names, MAX_NAMES);
        return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error, "there is no job \"%s\" in the cluster; %s", job,
                            tl_json_suggest(job, names, count, text, sizeof(text)));
    }
    if (role->kind == TL_ROLE_JOB || tl_cluster_find_index(tasks, first, end, index)) return TL_OK;
    return tl_json_fail(&value, TL_INVALID_ARGUMENT, ret_error,
                        "task %" PRIu32 " is not in the cluster, where %s; add it there or correct the index", index,
                        tl_cluster_describe_job(tasks, first, end, text, sizeof(text)));
}

enum tl_status tl_allow_list_check_tasks(const struct tl_security_settings *settings, struct tl_json_doc *doc,
                                         struct tl_config_task *tasks, size_t task_count, struct tl_error *ret_error)
{
    for (size_t i = 0; i < settings->allow_count; i++) {
        const struct tl_allow_rule *rule = &settings->allow[i];
        for (size_t j = 0; j < rule->role_count; j++) {
            enum tl_status status = check_role(&rule->roles[j], doc, tasks, task_count, ret_error);
            status = tl_json_collect(doc, status, ret_error);
            if (status != TL_OK) return status;
        }
    }
    return TL_OK;
}
