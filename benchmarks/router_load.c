/* Clients for benchmarks/router.py: closed loops on keep-alive connections, one epoll loop.
 *
 * router_load PORT CONNECTIONS WARMUP_S SECONDS RATE REQUEST_FILE: every connection sends the bytes of REQUEST_FILE, reads
 * the answer and sends again; with a RATE > 0 all together send at most so many a second. WARMUP_S begins when every
 * connection has had a first byte. Prints `begin` and `end` around the time that counts, then one line of JSON: requests,
 * failed ones, events, and percentiles of the requests' time, of the time to their first byte and of the events' delay
 * ("t" of router_mock), all in microseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { BUFFER = 262144, MOST_CONNECTIONS = 16384, START_S = 60 };

typedef struct {
    int fd, busy, head_done, chunked, status, waits;
    size_t sent;
    long left;                   /* of the body or of the chunk */
    int chunk_state;             /* 0: size line, 1: data, 2: line end after data, 3: trailer */
    size_t line_length, length;  /* of `line`, of `buffer` */
    char line[24];
    char *buffer;                /* the head, then events that are not complete */
    int64_t started, due;
    int first, answered;
} connection;

typedef struct {
    double *values;
    size_t count, size;
} sample;

static connection *all;
static int count_connections, poll_fd, port, counts, answered;
static char *request;
static size_t request_length;
static double rate;
static long requests, failed, events;
static sample times, firsts, delays;
static char scratch[BUFFER];

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void add(sample *to, double value) {
    if (!counts)
        return;
    if (to->count == to->size) {
        to->size = to->size ? 2 * to->size : 65536;
        if (!(to->values = realloc(to->values, to->size * sizeof(double))))
            exit(1);
    }
    to->values[to->count++] = value;
}

static int compare(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static void print_sample(const char *name, sample *of) {
    static const double shares[] = {0.5, 0.9, 0.99, 0.999};
    qsort(of->values, of->count, sizeof(double), compare);
    printf(", \"%s\": [", name);
    for (int index = 0; index < 4; index++)
        printf("%s%.1f", index ? ", " : "", of->count ? of->values[(size_t)(shares[index] * (of->count - 1))] : -1.0);
    printf("]");
}

static void watch(connection *c, int writable, int operation) {
    if (operation == EPOLL_CTL_MOD && c->waits == writable)
        return;
    c->waits = writable;
    struct epoll_event event = {EPOLLIN | (writable ? EPOLLOUT : 0), {.u32 = (uint32_t)(c - all)}};
    epoll_ctl(poll_fd, operation, c->fd, &event);
}

static void open_connection(connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int yes = 1;
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address)) {
        perror("router_load: connect");
        exit(1);
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    c->waits = 0;
    watch(c, 0, EPOLL_CTL_ADD);
}

static void send_more(connection *c) {
    while (c->sent < request_length) {
        ssize_t sent = send(c->fd, request + c->sent, request_length - c->sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            watch(c, 1, EPOLL_CTL_MOD); /* an error shows when it is read */
            return;
        }
        c->sent += sent;
    }
    watch(c, 0, EPOLL_CTL_MOD);
}

static void start(connection *c) {
    c->started = now_ns();
    c->sent = c->length = c->line_length = 0;
    c->busy = c->first = 1;
    c->head_done = c->chunked = c->chunk_state = 0;
    c->left = -1;
    send_more(c);
}

static void finish(connection *c, int good) {
    int64_t now = now_ns();
    c->busy = 0;
    if (counts) {
        requests++;
        failed += !good;
        add(&times, (now - c->started) / 1e3);
    }
    if (!good || c->fd < 0) {
        close(c->fd);
        open_connection(c);
    }
    if (rate <= 0)
        start(c);
    else {
        c->due += (int64_t)(1e9 * count_connections / rate);
        if (c->due < now)
            c->due = now;
    }
}

/* Text of the body: events are counted at their ends. */
static void body(connection *c, const char *data, size_t length) {
    int64_t now = now_ns();
    if (c->length + length > BUFFER)
        c->length = 0;
    if (length > BUFFER)
        return;
    memcpy(c->buffer + c->length, data, length);
    c->length += length;
    char *from = c->buffer, *stop = c->buffer + c->length, *end;
    while ((end = memmem(from, stop - from, "\n\n", 2))) {
        char *time = memmem(from, end - from, "\"t\":", 4);
        if (time) {
            if (counts)
                events++;
            add(&delays, (now - atoll(time + 4)) / 1e3);
        }
        from = end + 2;
    }
    c->length = stop - from;
    memmove(c->buffer, from, c->length);
}

/* 1: the answer is complete. */
static int chunked_body(connection *c, const char *data, size_t length) {
    for (size_t at = 0; at < length;) {
        if (c->chunk_state == 1) {
            size_t piece = (size_t)c->left < length - at ? (size_t)c->left : length - at;
            body(c, data + at, piece);
            at += piece;
            if ((c->left -= piece) == 0)
                c->chunk_state = 2;
            continue;
        }
        char byte = data[at++];
        if (byte != '\n') {
            if (byte != '\r' && c->line_length < sizeof c->line - 1)
                c->line[c->line_length++] = byte;
            continue;
        }
        c->line[c->line_length] = 0;
        if (c->chunk_state == 0) {
            c->left = strtol(c->line, NULL, 16);
            c->chunk_state = c->left ? 1 : 3;
        } else if (c->chunk_state == 2)
            c->chunk_state = 0;
        else if (c->line_length == 0)
            return 1;
        c->line_length = 0;
    }
    return 0;
}

static int feed(connection *c, char *data, size_t length) {
    if (!c->head_done) {
        if (c->length + length >= BUFFER)
            return -1;
        memcpy(c->buffer + c->length, data, length);
        c->length += length;
        c->buffer[c->length] = 0;
        char *end = memmem(c->buffer, c->length, "\r\n\r\n", 4);
        if (!end)
            return 0;
        answered += !c->answered;
        c->answered = 1;
        if (c->first)
            add(&firsts, (now_ns() - c->started) / 1e3);
        c->first = 0;
        *end = 0;
        char *size = strcasestr(c->buffer, "\r\ncontent-length:");
        c->chunked = strcasestr(c->buffer, "\r\ntransfer-encoding:") != NULL;
        c->status = atoi(c->buffer + 9);
        c->left = size ? atol(size + 17) : -1;
        c->head_done = 1;
        size_t rest = c->buffer + c->length - (end + 4);
        memmove(scratch, end + 4, rest);
        c->length = 0;
        data = scratch;
        length = rest;
    }
    if (c->chunked)
        return chunked_body(c, data, length);
    c->left -= length;
    return c->left == 0;
}

static void readable(connection *c) {
    ssize_t got = recv(c->fd, scratch, BUFFER / 2, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        if (c->busy)
            finish(c, 0);
        else {
            close(c->fd);
            open_connection(c);
        }
        return;
    }
    int done = feed(c, scratch, got);
    if (done)
        finish(c, done == 1 && c->status == 200);
}

int main(int number, char **arguments) {
    if (number != 7) {
        fprintf(stderr, "usage: router_load PORT CONNECTIONS WARMUP_S SECONDS RATE REQUEST_FILE\n");
        return 2;
    }
    port = atoi(arguments[1]);
    count_connections = atoi(arguments[2]);
    double warmup = atof(arguments[3]), seconds = atof(arguments[4]);
    rate = atof(arguments[5]);
    FILE *file = fopen(arguments[6], "rb");
    if (!file || count_connections < 1 || count_connections > MOST_CONNECTIONS) {
        fprintf(stderr, "router_load: cannot read %s, or CONNECTIONS is not between 1 and %d\n", arguments[6], MOST_CONNECTIONS);
        return 2;
    }
    fseek(file, 0, SEEK_END);
    request_length = ftell(file);
    rewind(file);
    request = malloc(request_length);
    if (fread(request, 1, request_length, file) != request_length)
        return 1;
    struct rlimit files = {MOST_CONNECTIONS + 64, MOST_CONNECTIONS + 64};
    setrlimit(RLIMIT_NOFILE, &files);
    poll_fd = epoll_create1(0);
    int timer = timerfd_create(CLOCK_MONOTONIC, 0);
    struct itimerspec tick = {{0, 500000}, {0, 500000}};
    if (rate > 0) {
        struct epoll_event event = {EPOLLIN, {.u32 = UINT32_MAX}};
        timerfd_settime(timer, 0, &tick, NULL);
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer, &event);
    }
    all = calloc(count_connections, sizeof *all);
    for (int index = 0; index < count_connections; index++) {
        all[index].buffer = malloc(BUFFER + 1);
        open_connection(&all[index]);
    }
    int64_t begin = now_ns(), from = INT64_MAX, to = INT64_MAX;
    for (int index = 0; index < count_connections; index++) {
        all[index].due = begin + (int64_t)(rate > 0 ? 1e9 * index / rate : 0);
        if (rate <= 0)
            start(&all[index]);
    }
    for (struct epoll_event ready[512];;) {
        int64_t now = now_ns();
        if (from == INT64_MAX && answered == count_connections)
            from = now + (int64_t)(warmup * 1e9);
        if (from == INT64_MAX && now > begin + START_S * 1000000000LL) {
            fprintf(stderr, "router_load: %d of %d connections had an answer\n", answered, count_connections);
            return 1;
        }
        if (!counts && now >= from) {
            counts = 1;
            from = now;
            to = now + (int64_t)(seconds * 1e9);
            printf("begin\n");
            fflush(stdout);
        }
        if (now >= to)
            break;
        int64_t next = counts ? to : from;
        int found = epoll_wait(poll_fd, ready, 512, next == INT64_MAX ? 100 : (int)((next - now) / 1000000) + 1);
        for (int index = 0; index < found; index++) {
            if (ready[index].data.u32 == UINT32_MAX) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) < 0)
                    continue;
                int64_t time = now_ns();
                for (int one = 0; one < count_connections; one++)
                    if (!all[one].busy && all[one].due <= time)
                        start(&all[one]);
                continue;
            }
            connection *c = &all[ready[index].data.u32];
            if (ready[index].events & EPOLLOUT)
                send_more(c);
            if (ready[index].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                readable(c);
        }
    }
    printf("end\n{\"seconds\": %.6f, \"requests\": %ld, \"failed\": %ld, \"events\": %ld", (now_ns() - from) / 1e9, requests, failed, events);
    print_sample("time_us", &times);
    print_sample("first_byte_us", &firsts);
    print_sample("delay_us", &delays);
    printf("}\n");
    return 0;
}
