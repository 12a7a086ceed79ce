/* Faults on demand for one directory of a process that preloads this.

   FAULTY_DIR      calls on files below it are concerned, all others go through
   FAULTY_CONTROL  a file with one line per fault: "write EIO", "read hang", "open EMFILE" ...
                   read at every such call; "hang" lasts until the line is gone */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int below(int fd, const char *name) {
    const char *wanted = getenv("FAULTY_DIR");
    char link[64], path[2 * PATH_MAX] = "";
    if (!wanted) return 0;
    if (!name || name[0] != '/') {
        if (fd < 0) return 0;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        if (length < 0) return 0;
        path[length] = 0;
        if (name) {
            strcat(path, "/");
            strncat(path, name, PATH_MAX - 1);
        }
    } else {
        strncat(path, name, PATH_MAX - 1);
    }
    return strncmp(path, wanted, strlen(wanted)) == 0;
}

/* The errno planted for a verb, 0 for none, -1 for a hang. */
static int planted(const char *verb) {
    const char *control = getenv("FAULTY_CONTROL");
    char text[512], line[64];
    int fd = control ? (int)syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    ssize_t length = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    text[length < 0 ? 0 : length] = 0;
    static const struct { const char *name; int number; } faults[] = {
        {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EMFILE", EMFILE}, {"EROFS", EROFS}, {"hang", -1}};
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        snprintf(line, sizeof line, "%s %s\n", verb, faults[i].name);
        if (strstr(text, line)) return faults[i].number;
    }
    return 0;
}

/* Whether the call fails; it has errno then. */
static int fails(const char *verb, int fd, const char *name) {
    if (!below(fd, name)) return 0;
    int number;
    while ((number = planted(verb)) < 0) usleep(5000);
    errno = number;
    return number != 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(verb, type, name, parameters, arguments) \
    type name parameters { return fails(verb, fd, NULL) ? -1 : REAL(name) arguments; }

WRAP("write", ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
WRAP("write", ssize_t, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRAP("write", ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP("write", int, fdatasync, (int fd), (fd))
WRAP("read", ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
WRAP("read", ssize_t, preadv64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))

static int opened(const char *symbol, int fd, const char *name, int flags, int mode) {
    if (fails("open", fd, name)) return -1;
    int (*real)(int, const char *, int, ...) = dlsym(RTLD_NEXT, symbol);
    return real(fd, name, flags, mode);
}

#define OPENAT(symbol)                                              \
    int symbol(int fd, const char *name, int flags, ...) {          \
        va_list rest;                                               \
        va_start(rest, flags);                                      \
        int mode = va_arg(rest, int);                               \
        va_end(rest);                                               \
        return opened(#symbol, fd, name, flags, mode);              \
    }

OPENAT(openat)
OPENAT(openat64)
