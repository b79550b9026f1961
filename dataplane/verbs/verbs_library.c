// SPDX-License-Identifier: Apache-2.0
/*
 * libibverbs, loaded when a device is first looked for, so that the same program runs on machines without it.
 *
 * Every function of libibverbs that the provider calls, or that an inline function of its header calls, is defined here
 * under its own name, and passes the call on to the loaded library. The definitions are hidden: no other library or
 * program sees them. They are weak, so that a test may put its own in their place.
 *
 * Functions that older releases lack are optional: without ibv_reg_dmabuf_mr (rdma-core 34) a card registers memory of
 * devices by its address only.
 *
 * A function is looked for in the whole process first and in the library second. So a library that was loaded before
 * with RTLD_GLOBAL may stand between the provider and libibverbs.
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>

#include "base/error.h"
#include "dataplane/verbs/verbs_internal.h"

/* The header replaces these names by functions of its own. */
#undef ibv_query_port
#undef ibv_reg_mr

/* FUNCTION(type, name, parameters, arguments) */
#define FUNCTIONS                                                                                                      \
    FUNCTION(struct ibv_device **, ibv_get_device_list, (int *count), (count))                                         \
    FUNCTION(void, ibv_free_device_list, (struct ibv_device * *list), (list))                                          \
    FUNCTION(const char *, ibv_get_device_name, (struct ibv_device * device), (device))                                \
    FUNCTION(struct ibv_context *, ibv_open_device, (struct ibv_device * device), (device))                            \
    FUNCTION(int, ibv_close_device, (struct ibv_context * context), (context))                                         \
    FUNCTION(int, ibv_query_device, (struct ibv_context * context, struct ibv_device_attr * ret), (context, ret))      \
    FUNCTION(int, ibv_query_port, (struct ibv_context * context, uint8_t port, struct _compat_ibv_port_attr * ret),    \
             (context, port, ret))                                                                                     \
    FUNCTION(int, _ibv_query_gid_ex,                                                                                   \
             (struct ibv_context * context, uint32_t port, uint32_t index, struct ibv_gid_entry * ret, uint32_t flags, \
              size_t entry_bytes),                                                                                     \
             (context, port, index, ret, flags, entry_bytes))                                                          \
    FUNCTION(ssize_t, _ibv_query_gid_table,                                                                            \
             (struct ibv_context * context, struct ibv_gid_entry * ret, size_t capacity, uint32_t flags,               \
              size_t entry_bytes),                                                                                     \
             (context, ret, capacity, flags, entry_bytes))                                                             \
    FUNCTION(int, ibv_get_async_event, (struct ibv_context * context, struct ibv_async_event * ret), (context, ret))   \
    FUNCTION(void, ibv_ack_async_event, (struct ibv_async_event * event), (event))                                     \
    FUNCTION(const char *, ibv_event_type_str, (enum ibv_event_type type), (type))                                     \
    FUNCTION(const char *, ibv_wc_status_str, (enum ibv_wc_status status), (status))                                   \
    FUNCTION(enum ibv_fork_status, ibv_is_fork_initialized, (void), ())                                                \
    FUNCTION(int, ibv_fork_init, (void), ())                                                                           \
    FUNCTION(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context * context), (context))                                 \
    FUNCTION(int, ibv_dealloc_pd, (struct ibv_pd * domain), (domain))                                                  \
    FUNCTION(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd * domain, void *address, size_t len_bytes, int access),       \
             (domain, address, len_bytes, access))                                                                     \
    FUNCTION(struct ibv_mr *, ibv_reg_mr_iova2,                                                                        \
             (struct ibv_pd * domain, void *address, size_t len_bytes, uint64_t iova, unsigned access),                \
             (domain, address, len_bytes, iova, access))                                                               \
    FUNCTION(int, ibv_dereg_mr, (struct ibv_mr * region), (region))                                                    \
    FUNCTION(struct ibv_comp_channel *, ibv_create_comp_channel, (struct ibv_context * context), (context))            \
    FUNCTION(int, ibv_destroy_comp_channel, (struct ibv_comp_channel * channel), (channel))                            \
    FUNCTION(                                                                                                          \
        struct ibv_cq *, ibv_create_cq,                                                                                \
        (struct ibv_context * context, int capacity, void *cq_context, struct ibv_comp_channel *channel, int vector),  \
        (context, capacity, cq_context, channel, vector))                                                              \
    FUNCTION(int, ibv_resize_cq, (struct ibv_cq * cq, int capacity), (cq, capacity))                                   \
    FUNCTION(int, ibv_destroy_cq, (struct ibv_cq * cq), (cq))                                                          \
    FUNCTION(int, ibv_get_cq_event, (struct ibv_comp_channel * channel, struct ibv_cq * *ret_cq, void **ret_context),  \
             (channel, ret_cq, ret_context))                                                                           \
    FUNCTION(void, ibv_ack_cq_events, (struct ibv_cq * cq, unsigned count), (cq, count))                               \
    FUNCTION(struct ibv_qp *, ibv_create_qp, (struct ibv_pd * domain, struct ibv_qp_init_attr * attributes),           \
             (domain, attributes))                                                                                     \
    FUNCTION(int, ibv_modify_qp, (struct ibv_qp * qp, struct ibv_qp_attr * attributes, int mask),                      \
             (qp, attributes, mask))                                                                                   \
    FUNCTION(int, ibv_destroy_qp, (struct ibv_qp * qp), (qp))

/* The addresses of all functions; NULL until the library is loaded. */
#define FUNCTION(type, name, parameters, arguments) type(*name) parameters;
static struct {
    FUNCTIONS
} functions;
#undef FUNCTION

#define FUNCTION(type, name, parameters, arguments)                                                                    \
    __attribute__((weak, visibility("hidden"))) type name parameters                                                   \
    {                                                                                                                  \
        return functions.name arguments;                                                                               \
    }
FUNCTIONS
#undef FUNCTION

static __typeof__(&ibv_reg_dmabuf_mr) register_dma_buf; /* NULL: libibverbs has none */

__attribute__((weak, visibility("hidden"))) struct ibv_mr *
ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t len_bytes, uint64_t iova, int file, int access)
{
    if (register_dma_buf != NULL) return register_dma_buf(domain, offset, len_bytes, iova, file, access);
    errno = EOPNOTSUPP;
    return NULL;
}

static void *find(void *library, const char *name)
{
    void *function = dlsym(RTLD_DEFAULT, name);
    return function != NULL ? function : dlsym(library, name);
}

static enum tl_status find_functions(void *library, struct tl_error *ret_error)
{
    const char *missing = NULL;
#define FUNCTION(type, name, parameters, arguments)                                                                    \
    if ((*(void **)&functions.name = find(library, #name)) == NULL) missing = #name;
    FUNCTIONS
#undef FUNCTION
    *(void **)&register_dma_buf = find(library, "ibv_reg_dmabuf_mr");
    if (missing == NULL) return TL_OK;
    return tl_error_set(ret_error, TL_NOT_FOUND,
                        "libibverbs.so.1 has no function %s: it is too old; update rdma-core (package libibverbs1)",
                        missing);
}

enum tl_status verbs_library_load(struct tl_error *ret_error)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static bool is_loaded;
    enum tl_status status = TL_OK;
    pthread_mutex_lock(&mutex);
    if (!is_loaded) {
        void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
        const char *reason = library == NULL ? dlerror() : NULL;
        status = library != NULL ? find_functions(library, ret_error)
                                 : tl_error_set(ret_error, TL_NOT_FOUND,
                                                "libibverbs.so.1 cannot be loaded (%s); install rdma-core (packages "
                                                "libibverbs1 and ibverbs-providers)",
                                                reason != NULL ? reason : "no reason was given");
        is_loaded = status == TL_OK;
        if (library != NULL && !is_loaded) dlclose(library);
    }
    pthread_mutex_unlock(&mutex);
    return status;
}
