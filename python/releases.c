// SPDX-License-Identifier: Apache-2.0
#include "python/releases.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>

struct py_releases {
    atomic_size_t references;
    _Atomic(struct py_release *) first;
    atomic_bool is_asked;      /* the main thread is going to empty the list */
    _Atomic(bool *) is_opener; /* in a page that the kernel clears in a child; NULL: no worker was opened */
    pthread_mutex_t mutex;     /* for is_stopped, and while something is asked of the main thread */
    bool is_stopped;
};

enum { PAGE_BYTES = 4096 };

bool py_releases_are_of_parent(const struct py_releases *releases)
{
    const bool *is_opener = atomic_load(&releases->is_opener);
    return is_opener != NULL && !*is_opener;
}

struct py_releases *py_releases_create(void)
{
    struct py_releases *releases = calloc(1, sizeof(*releases));
    if (releases == NULL) return NULL;
    atomic_init(&releases->references, 1);
    pthread_mutex_init(&releases->mutex, NULL);
    return releases;
}

void py_releases_put(struct py_releases *releases)
{
    if (releases == NULL || atomic_fetch_sub(&releases->references, 1) != 1) return;
    pthread_mutex_destroy(&releases->mutex);
    bool *is_opener = atomic_load(&releases->is_opener);
    if (is_opener != NULL) munmap(is_opener, PAGE_BYTES);
    free(releases);
}

struct py_release *py_release_create(struct py_releases *releases)
{
    struct py_release *release = calloc(1, sizeof(*release));
    if (release == NULL) return NULL;
    atomic_fetch_add(&releases->references, 1);
    release->releases = releases;
    return release;
}

void py_release_run(struct py_release *release)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (release->versioned != NULL) {
        if (release->versioned->deleter != NULL) release->versioned->deleter(release->versioned);
    } else if (release->managed != NULL) {
        if (release->managed->deleter != NULL) release->managed->deleter(release->managed);
    } else if (release->view.obj != NULL) {
        PyBuffer_Release(&release->view);
    }
    PyErr_Restore(type, value, traceback);
    py_releases_put(release->releases);
    free(release);
}

void py_releases_run(struct py_releases *releases)
{
    if (atomic_load_explicit(&releases->first, memory_order_relaxed) == NULL) return;
    struct py_release *release = atomic_exchange(&releases->first, NULL);
    while (release != NULL) {
        struct py_release *next = release->next;
        py_release_run(release);
        release = next;
    }
}

static int run_pending(void *context)
{
    struct py_releases *releases = context;
    atomic_store(&releases->is_asked, false); /* what comes from now on asks again */
    py_releases_run(releases);
    py_releases_put(releases);
    return 0;
}

/* When Python's list of calls is full, the next release asks again, and the next call of the package does it. */
static void ask_main_thread(struct py_releases *releases)
{
    /* Another thread of the parent may have had the mutex when this process was forked. */
    if (py_releases_are_of_parent(releases)) return;
    pthread_mutex_lock(&releases->mutex);
    if (!releases->is_stopped) {
        atomic_fetch_add(&releases->references, 1);
        if (Py_AddPendingCall(run_pending, releases) != 0) {
            atomic_fetch_sub(&releases->references, 1);
            atomic_store(&releases->is_asked, false);
        }
    }
    pthread_mutex_unlock(&releases->mutex);
}

void py_release_later(void *data, void *context)
{
    (void)data;
    struct py_release *release = context;
    struct py_releases *releases = release->releases;
    atomic_fetch_add(&releases->references, 1); /* another thread may run the release at once */
    release->next = atomic_load(&releases->first);
    while (!atomic_compare_exchange_weak(&releases->first, &release->next, release))
        continue;
    if (!atomic_exchange(&releases->is_asked, true)) ask_main_thread(releases);
    py_releases_put(releases);
}

bool py_releases_start(struct py_releases *releases)
{
    if (atomic_load(&releases->is_opener) != NULL) return true;
    bool *is_opener = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (is_opener == MAP_FAILED) return false;
    if (madvise(is_opener, PAGE_BYTES, MADV_WIPEONFORK) != 0) {
        munmap(is_opener, PAGE_BYTES);
        return false;
    }
    *is_opener = true;
    atomic_store(&releases->is_opener, is_opener);
    return true;
}

void py_releases_stop(struct py_releases *releases)
{
    if (py_releases_are_of_parent(releases)) return;
    pthread_mutex_lock(&releases->mutex);
    releases->is_stopped = true;
    pthread_mutex_unlock(&releases->mutex);
}
