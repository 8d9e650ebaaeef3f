/* Engines for benchmarks/router.py: vLLM's answers at the speed of one core, without a model. One epoll loop.
 *
 * router_mock ENGINES: listens on ENGINES ports of 127.0.0.1 and prints them, then serves until SIGTERM.
 * A stream has max_tokens events, one every interval_us of the request (without: as fast as they are read, each in a
 * write of its own), with the time of its sending in nanoseconds (CLOCK_MONOTONIC) as "t". A POST that asks for do_remote_decode is answered as a prefill engine's NIXL
 * connector does. Four bytes of a body count as a token of its prompt. GET /mock/counts: requests and open connections of that engine since its start.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
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

enum { MOST_ENGINES = 16, BATCH = 64, EVENT_BYTES = 248, TICK_NS = 1000000, MOST_FDS = 65536 };

typedef struct {
    int fd, engine, listener;
    char *in;
    size_t in_size, in_length;
    char *out;
    size_t out_size, out_start, out_length;
    long prompt_tokens;
    long left;         /* events of the stream under way */
    long interval_us;  /* between them */
    int64_t due_ns;    /* of the next one, when paced */
    int waits;         /* for EPOLLOUT */
    int stream_index;  /* in `streams`, or -1 */
} connection;

static connection *connections[MOST_FDS];
static connection *streams[MOST_FDS];
static int stream_count, poll_fd;
static long requests[MOST_ENGINES], open_connections[MOST_ENGINES];

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void watch(connection *c, int writable) {
    if (c->waits == writable)
        return;
    c->waits = writable;
    struct epoll_event event = {EPOLLIN | (writable ? EPOLLOUT : 0), {.fd = c->fd}};
    epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void end_stream(connection *c) {
    if (c->stream_index < 0)
        return;
    connection *last = streams[--stream_count];
    streams[c->stream_index] = last;
    last->stream_index = c->stream_index;
    c->stream_index = -1;
    c->left = 0;
}

static void drop(connection *c) {
    end_stream(c);
    open_connections[c->engine]--;
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static void put(connection *c, const char *data, size_t length) {
    if (c->out_start + c->out_length + length > c->out_size) {
        memmove(c->out, c->out + c->out_start, c->out_length);
        c->out_start = 0;
        while (c->out_length + length > c->out_size)
            c->out_size = c->out_size ? 2 * c->out_size : 4096;
        if (!(c->out = realloc(c->out, c->out_size)))
            fail("realloc");
    }
    memcpy(c->out + c->out_start + c->out_length, data, length);
    c->out_length += length;
}

/* 0: all is sent, 1: the socket is full, -1: the connection is gone (and dropped). */
static int flush(connection *c) {
    while (c->out_length) {
        ssize_t sent = send(c->fd, c->out + c->out_start, c->out_length, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) {
                watch(c, 1);
                return 1;
            }
            drop(c);
            return -1;
        }
        c->out_start += sent;
        c->out_length -= sent;
    }
    c->out_start = 0;
    return 0;
}

static void put_chunk(connection *c, const char *data, size_t length) {
    char size[24];
    put(c, size, sprintf(size, "%zx\r\n", length));
    put(c, data, length);
    put(c, "\r\n", 2);
}

static void put_event(connection *c) {
    char event[EVENT_BYTES + 1];
    const char *finish = c->left == 1 ? "\"length\"" : "null";
    int length = sprintf(event,
                         "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                         "\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"token\"},"
                         "\"finish_reason\":%s}],\"t\":%lld,\"x\":\"",
                         finish, (long long)now_ns());
    memset(event + length, 'x', EVENT_BYTES - 4 - length);
    memcpy(event + EVENT_BYTES - 4, "\"}\n\n", 4);
    put_chunk(c, event, EVENT_BYTES);
    if (--c->left == 0) {
        char usage[512];
        length = sprintf(usage,
                         "data: {\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                         "\"model\":\"mock\",\"choices\":[],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,"
                         "\"completion_tokens\":16}}\n\n",
                         c->prompt_tokens, c->prompt_tokens + 16);
        put_chunk(c, usage, length);
        put_chunk(c, "data: [DONE]\n\n", 14);
        put(c, "0\r\n\r\n", 5);
        end_stream(c);
    }
}

static void answer(connection *c, const char *type, const char *body) {
    char head[256];
    put(c, head, sprintf(head, "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: %s\r\ncontent-length: %zu\r\n\r\n", type, strlen(body)));
    put(c, body, strlen(body));
}

static void answer_get(connection *c, const char *path) {
    static const char *metrics = "# TYPE vllm:num_requests_running gauge\n"
                                 "vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} 0\n"
                                 "# TYPE vllm:num_requests_waiting gauge\n"
                                 "vllm:num_requests_waiting{engine=\"0\",model_name=\"mock\"} 0\n"
                                 "# TYPE vllm:kv_cache_usage_perc gauge\n"
                                 "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"mock\"} 0\n"
                                 "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"4194304\"} 1\n";
    char body[512];
    if (!strncmp(path, "/metrics", 8))
        answer(c, "text/plain; version=0.0.4; charset=utf-8", metrics);
    else if (!strncmp(path, "/v1/models", 10))
        answer(c, "application/json", "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,"
                                      "\"owned_by\":\"mock\",\"root\":\"mock\",\"max_model_len\":4194304}]}");
    else if (!strncmp(path, "/load", 5))
        answer(c, "application/json", "{\"server_load\":0}");
    else if (!strncmp(path, "/mock/counts", 12)) {
        sprintf(body, "{\"requests\":%ld,\"open\":%ld}", requests[c->engine], open_connections[c->engine]);
        answer(c, "application/json", body);
    } else
        answer(c, "application/json", "{}");
}

static void answer_post(connection *c, const char *path, const char *body, size_t length) {
    char json[1024];
    static const char prefilled[] =
        "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":"
        "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"a\"},\"finish_reason\":\"length\"}],\"usage\":"
        "{\"prompt_tokens\":%ld,\"total_tokens\":%ld,\"completion_tokens\":1,\"prompt_tokens_details\":{\"cached_tokens\":0}},"
        "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"remote_block_ids\":[[1,2,3,4]],"
        "\"remote_engine_id\":\"mock\",\"remote_request_id\":\"r\",\"remote_host\":\"127.0.0.1\",\"remote_port\":1,"
        "\"tp_size\":1}}";
    static const char whole[] =
        "{\"id\":\"chatcmpl-0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"mock\",\"choices\":"
        "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"an answer of sixteen tokens, or about as many\"},"
        "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":%ld,\"total_tokens\":%ld,"
        "\"completion_tokens\":16,\"prompt_tokens_details\":{\"cached_tokens\":0}}}";
    static const char rendered[] = "{\"token_ids\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],\"sampling_params\":{}}";
    c->prompt_tokens = length / 4;
    if (strstr(path, "/render"))
        answer(c, "application/json", rendered);
    else if (memmem(body, length, "\"do_remote_decode\":true", 23) || memmem(body, length, "\"do_remote_decode\": true", 24))
        answer(c, "application/json", (sprintf(json, prefilled, c->prompt_tokens, c->prompt_tokens + 1), json));
    else if (memmem(body, length, "\"stream\":true", 13) || memmem(body, length, "\"stream\": true", 14)) {
        const char *limit = memmem(body, length, "\"max_tokens\":", 13);
        const char *interval = memmem(body, length, "\"interval_us\":", 14);
        c->left = limit ? atol(limit + 13) : 16;
        c->interval_us = interval ? atol(interval + 14) : 0;
        static const char head[] = "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                   "transfer-encoding: chunked\r\n\r\n";
        put(c, head, sizeof head - 1);
        /* Streams that begin together do not tick together. */
        c->due_ns = now_ns() + rand() % (c->interval_us + 1) * 1000;
        c->stream_index = stream_count;
        streams[stream_count++] = c;
    } else
        answer(c, "application/json", (sprintf(json, whole, c->prompt_tokens, c->prompt_tokens + 16), json));
}

/* Whether a complete request was there; it is answered and taken away. */
static int take_request(connection *c) {
    char *end = c->in_length ? memmem(c->in, c->in_length, "\r\n\r\n", 4) : NULL;
    if (!end)
        return 0;
    size_t head = end + 4 - c->in, body = 0;
    *end = 0;
    char *length = strcasestr(c->in, "\r\ncontent-length:"), *chunked = strcasestr(c->in, "\r\ntransfer-encoding: chunked");
    *end = '\r';
    if (length)
        body = strtoul(length + 17, NULL, 10);
    else if (chunked) { /* only to its end: the pieces' sizes stay in the text, which is searched and no more */
        char *last = memmem(c->in + head, c->in_length - head, "0\r\n\r\n", 5);
        if (!last)
            return 0;
        body = last + 5 - (c->in + head);
    }
    if (c->in_length < head + body)
        return 0;
    char path[256] = "";
    int get = c->in[0] == 'G';
    sscanf(c->in, "%*s %255s", path);
    if (get)
        answer_get(c, path);
    else {
        requests[c->engine]++;
        answer_post(c, path, c->in + head, body);
    }
    c->in_length -= head + body;
    memmove(c->in, c->in + head + body, c->in_length);
    return 1;
}

static void pump(connection *c, int64_t now) {
    if (c->interval_us) {
        while (c->left && c->due_ns <= now) {
            put_event(c);
            c->due_ns += c->interval_us * 1000;
        }
        flush(c);
        return;
    }
    for (int state = 0; c->left && !state;) {
        for (int number = 0; number < BATCH && c->left && !state; number++) {
            put_event(c); /* one write an event, as an engine does */
            if ((state = flush(c)) < 0)
                return;
        }
        if (!state && c->left) { /* others first */
            watch(c, 1);
            return;
        }
    }
}

static void readable(connection *c) {
    for (;;) {
        if (c->in_size - c->in_length < 65536) {
            c->in_size = c->in_size ? 2 * c->in_size : 131072;
            if (!(c->in = realloc(c->in, c->in_size)))
                fail("realloc");
        }
        ssize_t got = recv(c->fd, c->in + c->in_length, c->in_size - c->in_length, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) {
            drop(c);
            return;
        }
        if (got < 0)
            break;
        c->in_length += got;
    }
    while (c->stream_index < 0 && take_request(c))
        ;
    if (flush(c) == 0 && c->left && !c->interval_us)
        pump(c, 0);
}

static void writable(connection *c) {
    if (flush(c))
        return;
    watch(c, 0);
    if (c->left && !c->interval_us)
        pump(c, 0);
}

static void accept_all(int listener, int engine) {
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        if (fd >= MOST_FDS) {
            close(fd);
            continue;
        }
        int yes = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        connection *c = connections[fd] = calloc(1, sizeof *c);
        c->fd = fd;
        c->engine = engine;
        c->stream_index = -1;
        open_connections[engine]++;
        struct epoll_event event = {EPOLLIN, {.fd = fd}};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int count, char **arguments) {
    int engines = count > 1 ? atoi(arguments[1]) : 1, listeners[MOST_ENGINES];
    if (engines < 1 || engines > MOST_ENGINES) {
        fprintf(stderr, "router_mock: ENGINES %d: must be between 1 and %d\n", engines, MOST_ENGINES);
        return 2;
    }
    struct rlimit files = {MOST_FDS, MOST_FDS};
    setrlimit(RLIMIT_NOFILE, &files);
    poll_fd = epoll_create1(0);
    for (int engine = 0; engine < engines; engine++) {
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t size = sizeof address;
        int fd = listeners[engine] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        if (bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096) || getsockname(fd, (struct sockaddr *)&address, &size))
            fail("listen");
        struct epoll_event event = {EPOLLIN, {.fd = fd}};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &event);
        printf("%d\n", ntohs(address.sin_port));
    }
    fflush(stdout);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    struct itimerspec tick = {{0, TICK_NS}, {0, TICK_NS}};
    struct epoll_event event = {EPOLLIN, {.fd = timer}};
    timerfd_settime(timer, 0, &tick, NULL);
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer, &event);
    for (struct epoll_event ready[512];;) {
        int number = epoll_wait(poll_fd, ready, 512, -1);
        for (int index = 0; index < number; index++) {
            int fd = ready[index].data.fd, engine = 0;
            if (fd == timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) > 0) {
                    int64_t now = now_ns();
                    for (int stream = stream_count; stream-- > 0;)
                        if (stream < stream_count && streams[stream]->interval_us)
                            pump(streams[stream], now);
                }
                continue;
            }
            while (engine < engines && listeners[engine] != fd)
                engine++;
            if (engine < engines) {
                accept_all(fd, engine);
                continue;
            }
            if (connections[fd] && ready[index].events & EPOLLOUT)
                writable(connections[fd]);
            if (connections[fd] && ready[index].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                readable(connections[fd]);
        }
    }
}
