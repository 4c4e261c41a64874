/* Preloaded into a process, makes one system call go wrong: FAIL_CALL, on a path that contains FAIL_PATH, for the
   FAIL_NUMBER-th time since the file FAIL_FLAG is there. FAIL_HOW is an errno, or "short", "lost", "garbled", "nothing".
   With FAIL_ALWAYS all later ones go wrong, too. The file FAIL_LOG is made when one does. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, name)

static int fails(const char *call, const char *path) {
    static __thread int inside;
    static int count;
    const char *wanted = getenv("FAIL_CALL"), *part = getenv("FAIL_PATH"), *flag = getenv("FAIL_FLAG");
    if (inside || !wanted || !part || !flag || !path || strcmp(wanted, call) || !strstr(path, part)) return 0;
    inside = 1;
    int now = 0;
    if (access(flag, F_OK) == 0) {
        int number = __sync_add_and_fetch(&count, 1), first = atoi(getenv("FAIL_NUMBER"));
        now = getenv("FAIL_ALWAYS") ? number >= first : number == first;
        if (now) {
            int (*opens)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
            int (*closes)(int) = dlsym(RTLD_NEXT, "close");
            closes(opens(getenv("FAIL_LOG"), O_WRONLY | O_CREAT, 0600));
        }
    }
    inside = 0;
    return now;
}

static int failure(void) {
    errno = atoi(getenv("FAIL_HOW"));
    return -1;
}

static int is(const char *how) { return !strcmp(getenv("FAIL_HOW"), how); }

static const char *path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, 4095);
    if (size < 0) return NULL;
    path[size] = 0;
    return path;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[4096];
    if (!size || !fails("write", path_of(fd, path))) return real(fd, data, size);
    if (is("short")) return real(fd, data, size > 1 ? size / 2 : size);
    if (is("lost")) return size;
    if (is("garbled")) {
        char *copy = malloc(size);
        memcpy(copy, data, size);
        copy[size / 2] ^= 1;
        ssize_t found = real(fd, copy, size);
        free(copy);
        return found;
    }
    return failure();
}

#define READS(name, ...) \
    REAL(ssize_t, name, __VA_ARGS__); \
    char path[4096]; \
    int wrong = fails("read", path_of(fd, path)); \
    if (wrong) return is("nothing") ? 0 : failure()

ssize_t read(int fd, void *data, size_t size) { READS("read", int, void *, size_t); return real(fd, data, size); }
ssize_t pread64(int fd, void *data, size_t size, off64_t at) { READS("pread64", int, void *, size_t, off64_t); return real(fd, data, size, at); }
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t at) { READS("preadv64", int, const struct iovec *, int, off64_t); return real(fd, v, n, at); }
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t at, int flags) { READS("preadv64v2", int, const struct iovec *, int, off64_t, int); return real(fd, v, n, at, flags); }

int fsync(int fd) {
    REAL(int, "fsync", int);
    char path[4096];
    return fails("fsync", path_of(fd, path)) ? failure() : real(fd);
}

int rename(const char *old, const char *new) { REAL(int, "rename", const char *, const char *); return fails("rename", old) ? failure() : real(old, new); }
int mkdir(const char *path, mode_t mode) { REAL(int, "mkdir", const char *, mode_t); return fails("mkdir", path) ? failure() : real(path, mode); }
int unlink(const char *path) { REAL(int, "unlink", const char *); return fails("unlink", path) ? failure() : real(path); }
int rmdir(const char *path) { REAL(int, "rmdir", const char *); return fails("unlink", path) ? failure() : real(path); }

int unlinkat(int folder, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[4096];
    return fails("unlink", path_of(folder, path)) ? failure() : real(folder, name, flags);
}

#define OPENS(name) \
    REAL(int, name, const char *, int, ...); \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, int); \
        va_end(more); \
    } \
    return fails("open", path) ? failure() : real(path, flags, mode)

int open(const char *path, int flags, ...) { OPENS("open"); }
int open64(const char *path, int flags, ...) { OPENS("open64"); }
