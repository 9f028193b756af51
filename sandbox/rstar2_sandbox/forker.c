/* The keeper's loop in C: fork, confine, wait, empty the slot, answer. The same steps as keeper.py, which does them
   where this was not compiled; tests/sandbox/test_forker.py holds the two to each other. Not a Python module: it needs no
   headers of Python, is loaded through ctypes with the interpreter's lock held, and touches no Python object, so that a
   keeper's pages stay shared with the warm interpreter. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum { NAMESPACES = 0, UID = 1, PLAIN = 2 };
enum { WIPE = 1, GONE = 2 };  /* forker.py */

struct fence {                 /* keeper.FENCE */
    int32_t control, tier, child_uid, children_fd;
    uint64_t memory_base, free_blocks, free_inodes;
    char folder[256];
} __attribute__((packed));

struct request {               /* keeper.REQUEST */
    char kind;
    uint64_t serial, cpu_s, memory_bytes, file_bytes, processes;
} __attribute__((packed));

struct reply {                 /* keeper.REPLY */
    uint64_t serial;
    int32_t status;
    double user_s, system_s;
    uint64_t peak_bytes;
    double run_s;
    uint32_t strays, clean;
} __attribute__((packed));

/* What rstar2_serve and its neighbours mean, as a number: forker.py takes no library of another one. */
int rstar2_version(void) { return 2; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static ssize_t receive(int control, struct request *request, int fds[4], int *count) {
    union { struct cmsghdr align; char space[CMSG_SPACE(4 * sizeof(int))]; } box;
    struct iovec part = {request, sizeof *request};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = box.space,
                             .msg_controllen = sizeof box.space};
    ssize_t size;
    *count = 0;
    do size = recvmsg(control, &message, 0); while (size < 0 && errno == EINTR);
    struct cmsghdr *head = size > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
        *count = (int)((head->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        memcpy(fds, CMSG_DATA(head), *count * sizeof(int));
    }
    return size;
}

static int limit(int what, uint64_t soft, uint64_t hard) {
    struct rlimit pair = {soft, hard};
    return setrlimit(what, &pair);
}

static int confine(const struct fence *fence, const struct request *request, const int fds[4]) {
    static const int places[4] = {3, 0, 1, 2};  /* source, stdin, stdout, stderr */
    for (int n = 1; n < 4; n++)
        if (dup2(fds[n], places[n]) < 0) return -1;
    if (dup2(fds[0], 3) < 0) return -1;
    if (syscall(SYS_close_range, 4, ~0U, 0) < 0)
        for (int fd = 4; fd < 4096; fd++) close(fd);
    setsid();
    uint64_t memory = fence->memory_base + request->memory_bytes, processes = request->processes;
    if (limit(RLIMIT_CPU, request->cpu_s, request->cpu_s + 1) || limit(RLIMIT_AS, memory, memory) ||
        limit(RLIMIT_FSIZE, request->file_bytes, request->file_bytes))
        return -1;
    if (fence->child_uid >= 0) {
        uid_t id = (uid_t)fence->child_uid;
        if (limit(RLIMIT_NPROC, processes, processes) || setresgid(id, id, id) || setresuid(id, id, id) ||
            prctl(PR_SET_DUMPABLE, 1, 0, 0, 0))
            return -1;
    } else if (fence->tier == NAMESPACES) {
        uint32_t header[2] = {0x20080522, 0}, none[6] = {0};
        if (limit(RLIMIT_NPROC, processes + 1, processes + 1) || syscall(SYS_capset, header, none)) return -1;
    }
    if (fence->tier != NAMESPACES && prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)) return -1;
    return chdir(fence->folder);
}

static void kill_strays(const struct fence *fence) {
    if (fence->tier == NAMESPACES) {
        kill(-1, SIGKILL);
    } else if (fence->child_uid >= 0) {
        pid_t pid = fork();
        if (pid == 0) {
            uid_t id = (uid_t)fence->child_uid;
            if (!setresuid(id, id, id)) kill(-1, SIGKILL);
            _exit(0);
        }
        if (pid > 0) waitpid(pid, NULL, 0);
    } else if (fence->children_fd >= 0) {
        char text[4096];
        ssize_t size = pread(fence->children_fd, text, sizeof text - 1, 0);
        text[size > 0 ? size : 0] = 0;
        for (char *at = text, *end; *at; at = end) {
            long pid = strtol(at, &end, 10);
            if (end == at) break;
            kill((pid_t)pid, SIGKILL);
        }
    }
}

static uint32_t empty_slot(const struct fence *fence) {
    uint32_t strays = 0;
    for (;;) {
        pid_t pid = waitpid(-1, NULL, WNOHANG);
        if (pid == 0) {
            kill_strays(fence);
            pid = waitpid(-1, NULL, 0);
        }
        if (pid < 0 && errno == ECHILD) return strays;
        if (pid > 0) strays++;
    }
}

static int is_clean(const struct fence *fence) {
    if (fence->tier == NAMESPACES) {
        struct statvfs stat;
        return !statvfs(fence->folder, &stat) && stat.f_bfree == fence->free_blocks &&
               stat.f_ffree == fence->free_inodes;
    }
    int entries = 0;
    DIR *folder = opendir(fence->folder);
    if (!folder) return 0;
    while (readdir(folder)) entries++;
    closedir(folder);
    return entries == 2;
}

/* Wait for the leader; obey a kill; end with it when the parent is gone. */
static void watch(const struct fence *fence, pid_t pid, uint64_t serial) {
    int leader = (int)syscall(SYS_pidfd_open, pid, 0), count, fds[4];
    struct pollfd both[2] = {{leader, POLLIN, 0}, {fence->control, POLLIN, 0}};
    for (;;) {
        if (poll(both, 2, -1) < 0) continue;
        if (both[0].revents) break;
        struct request request;
        ssize_t size = receive(fence->control, &request, fds, &count);
        if (size <= 0) {
            kill(pid, SIGKILL);
            empty_slot(fence);
            _exit(0);
        }
        pid_t all = fence->tier == NAMESPACES ? -1 : pid;
        if (request.serial != serial) continue;
        if (request.kind == 'K') kill(pid, SIGKILL);
        if (request.kind == 'P') kill(all, SIGSTOP);
        if (request.kind == 'C') kill(all, SIGCONT);
    }
    close(leader);
}

static struct fence the_fence;
static struct reply the_reply;
static volatile int *confined;  /* set by a child that stands confined, and out of its reach before it runs anything */

/* Say what rstar2_serve works with, once; returns where it leaves answers that the caller sends, NULL without memory. */
struct reply *rstar2_prepare(const struct fence *fence) {
    the_fence = *fence;
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    confined = page == MAP_FAILED ? NULL : page;
    return confined ? &the_reply : NULL;
}

/* Serve calls. Returns in each child, confined, the kind of the call and above its 8 bits the size of its source; WIPE
   in the keeper when the folders are not as at first (the caller wipes them and sends the answer); GONE when the parent
   has gone, or when a child could not be made or confined: then nothing ran, and the keeper ends, which the parent takes
   for a fault of ours. */
int rstar2_serve(void) {
    const struct fence *fence = &the_fence;
    struct reply *reply = &the_reply;
    for (;;) {
        struct request request;
        int fds[4], count;
        if (receive(fence->control, &request, fds, &count) <= 0) return GONE;
        if (count != 4) {
            while (count > 0) close(fds[--count]);
            continue;
        }
        double started = now();
        *confined = 0;
        pid_t pid = fork();
        if (pid == 0) {
            if (confine(fence, &request, fds)) _exit(1);
            *confined = 1;
            munmap((void *)confined, 4096);
            struct stat source;
            return request.kind | (fstat(3, &source) ? 0 : (int)source.st_size << 8);
        }
        if (pid < 0) return GONE;
        for (int n = 0; n < 4; n++) close(fds[n]);
        struct rusage usage;
        int status;
        watch(fence, pid, request.serial);
        wait4(pid, &status, 0, &usage);
        if (!*confined) return GONE;
        reply->serial = request.serial;
        reply->status = status;
        reply->user_s = usage.ru_utime.tv_sec + 1e-6 * usage.ru_utime.tv_usec;
        reply->system_s = usage.ru_stime.tv_sec + 1e-6 * usage.ru_stime.tv_usec;
        reply->peak_bytes = (uint64_t)usage.ru_maxrss * 1024;
        reply->run_s = now() - started;
        reply->strays = empty_slot(fence);
        reply->clean = is_clean(fence);
        if (!reply->clean) return WIPE;
        if (send(fence->control, reply, sizeof *reply, MSG_NOSIGNAL) < 0) return GONE;
    }
}

/* Python's arenas out of one aligned reserve, so that a few huge pages hold them all. */
#define HUGE ((size_t)2 << 20)
static char *next_arena, *reserve_end;

static void *arena_alloc(void *context, size_t size) {
    (void)context;
    if (next_arena && next_arena + size <= reserve_end) {
        next_arena += size;
        return next_arena - size;
    }
    void *place = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return place == MAP_FAILED ? NULL : place;
}

static void arena_free(void *context, void *place, size_t size) {
    (void)context;
    munmap(place, size);
}

struct allocator { void *context; void *(*alloc)(void *, size_t); void (*free)(void *, void *, size_t); };

/* Fill an allocator for PyObject_SetArenaAllocator; 0 when there is no room for the reserve. */
int rstar2_reserve(struct allocator *allocator, size_t size) {
    char *place = mmap(NULL, size + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return 0;
    next_arena = (char *)(((uintptr_t)place + HUGE - 1) & ~(HUGE - 1));
    reserve_end = next_arena + size;
    if (next_arena > place) munmap(place, next_arena - place);
    munmap(reserve_end, place + size + HUGE - reserve_end);
    allocator->context = NULL;
    allocator->alloc = arena_alloc;
    allocator->free = arena_free;
    return 1;
}

/* Give back what the reserve has not used, up to a whole huge page. */
void rstar2_trim(void) {
    char *end = (char *)(((uintptr_t)next_arena + HUGE - 1) & ~(HUGE - 1));
    if (next_arena && end < reserve_end) {
        munmap(end, reserve_end - end);
        reserve_end = end;
    }
}

/* Collapse every whole huge page of a range; returns how many are huge now. */
int rstar2_collapse(uintptr_t start, uintptr_t end) {
    int done = 0;
    for (uintptr_t at = (start + HUGE - 1) & ~(HUGE - 1); at + HUGE <= end; at += HUGE)
        done += !madvise((void *)at, HUGE, 25 /* MADV_COLLAPSE */);
    return done;
}
