/* The client of the HTTP benchmarks: many streams over raw sockets, one thread, one epoll.
 *
 *     http_client ADDRESS PORT CONNECTIONS LIMIT_SECONDS keep|fresh <calls >trace
 *
 * calls: for each request a head (struct call) and its bytes, the whole HTTP/1.1 request. Those of one connection are sent one
 * after the other, each `after_ns` after the end of the one before it (the first: after the start). All connections stand before
 * the clock starts. keep: they are kept alive, unless the server says that it closes. fresh: each request has a new one, opened
 * before it is sent (for a server that closes without a word).
 *
 * trace: a struct summary, then its events in order of time. What a server sends is read as far as is needed to know what came
 * when: status, chunked body, lines `data: {...}`. Everything else of an answer is skipped, so that the client's own
 * CPU time stays far below that of any server.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 16, MAX_LINE = 1 << 20, MAX_READY = 256 };

enum kind {
    SENT = 1,     /* the request's last byte was given to the kernel */
    TEXT = 2,     /* value: events with text that one read brought */
    PROMPT = 3,   /* value: prompt tokens, from usage */
    CACHED = 4,   /* value: prompt tokens not read again, from usage or timings */
    END = 5,      /* the answer is complete; value: generated tokens, from usage */
    FAILED = 6,   /* value: the status, or 0 for an error event or a broken connection */
};

struct call {
    uint32_t connection, length;
    uint64_t after_ns;
};

struct event {
    uint64_t ns; /* since the start */
    uint16_t connection, kind;
    uint32_t value;
};

struct summary {
    uint64_t events, wall_ns, cpu_ns, reads, bytes, reconnects;
};

struct request {
    struct request *next;
    uint64_t after_ns;
    uint32_t length;
    char bytes[];
};

enum state { WAITING, SENDING, HEAD, CHUNK_SIZE, CHUNK, CHUNK_END, LENGTH, DONE };

struct stream {
    int fd, index;
    enum state state;
    struct request *first, *last;
    size_t sent;
    uint64_t due_ns;
    uint64_t left; /* bytes of the chunk or of the body */
    int is_chunked, is_last_chunk, closes, status, has_failed;
    uint32_t tokens, texts;
    char *line; /* the head's or the body's unfinished line */
    size_t used;
    char size_text[32];
    size_t size_used;
};

static struct sockaddr_in server;
static struct stream *streams;
static struct summary summary;
static struct event *events;
static size_t events_room;
static uint64_t start_ns;
static int epoll_fd, open_streams, is_fresh;

static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("http_client: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    exit(1);
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t now_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC) - start_ns;
}

static void note(const struct stream *stream, enum kind kind, uint32_t value, uint64_t ns)
{
    if (summary.events == events_room) {
        events_room = events_room ? 2 * events_room : 1 << 16;
        if ((events = realloc(events, events_room * sizeof *events)) == NULL)
            die("no memory for %zu events", events_room);
    }
    events[summary.events++] = (struct event){ns, (uint16_t)stream->index, (uint16_t)kind, value};
}

static void connect_stream(struct stream *stream)
{
    int one = 1;
    stream->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (stream->fd < 0 || connect(stream->fd, (struct sockaddr *)&server, sizeof server) < 0)
        die("no connection to port %d: %s", ntohs(server.sin_port), strerror(errno));
    setsockopt(stream->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(stream->fd, F_SETFL, fcntl(stream->fd, F_GETFL) | O_NONBLOCK);
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = stream};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, stream->fd, &interest) < 0)
        die("epoll: %s", strerror(errno));
}

static void watch_output(struct stream *stream, int is_wanted)
{
    struct epoll_event interest = {.events = is_wanted ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = stream};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, stream->fd, &interest);
}

static void reconnect(struct stream *stream)
{
    close(stream->fd);
    connect_stream(stream);
    summary.reconnects++;
}

static void send_request(struct stream *stream)
{
    struct request *request = stream->first;
    while (stream->sent < request->length) {
        ssize_t n = send(stream->fd, request->bytes + stream->sent, request->length - stream->sent, MSG_NOSIGNAL);
        if (n > 0) {
            stream->sent += (size_t)n;
        } else if (errno == EAGAIN) {
            stream->state = SENDING;
            watch_output(stream, 1);
            return;
        } else if (errno == EPIPE || errno == ECONNRESET) {
            reconnect(stream);
            stream->sent = 0;
        } else if (errno != EINTR) {
            die("send: %s", strerror(errno));
        }
    }
    if (stream->state == SENDING)
        watch_output(stream, 0);
    stream->state = HEAD;
    note(stream, SENT, request->length, now_ns());
}

static void begin_request(struct stream *stream)
{
    stream->sent = stream->used = stream->size_used = 0;
    stream->tokens = stream->texts = 0;
    stream->is_chunked = stream->is_last_chunk = stream->closes = stream->has_failed = stream->status = 0;
    stream->left = 0;
    send_request(stream);
}

static void end_answer(struct stream *stream, uint64_t ns)
{
    struct request *done = stream->first;
    if (stream->status != 200 || stream->has_failed)
        note(stream, FAILED, (uint32_t)stream->status, ns);
    else
        note(stream, END, stream->tokens, ns);
    stream->first = done->next;
    free(done);
    if (stream->first == NULL) {
        stream->state = DONE;
        open_streams--;
        return;
    }
    stream->state = WAITING;
    stream->due_ns = ns + stream->first->after_ns;
    if (stream->closes || is_fresh)
        reconnect(stream);
}

/* The number behind `key`, or -1. */
static long number_of(const char *line, size_t length, const char *key)
{
    const char *at = memmem(line, length, key, strlen(key));
    return at ? strtol(at + strlen(key), NULL, 10) : -1;
}

static int has_text(const char *line, size_t length, const char *key)
{
    const char *at = memmem(line, length, key, strlen(key));
    return at != NULL && at[strlen(key)] != '"';
}

static void on_data(struct stream *stream, const char *line, size_t length, uint64_t ns)
{
    long value;
    if (has_text(line, length, "\"text\":\"") || has_text(line, length, "\"content\":\""))
        stream->texts++;
    else if (memmem(line, length < 24 ? length : 24, "{\"error\"", 8) != NULL)
        stream->has_failed = 1;
    if (memmem(line, length, "\"usage\":{", 9) != NULL) {
        if ((value = number_of(line, length, "\"completion_tokens\":")) >= 0)
            stream->tokens = (uint32_t)value;
        if ((value = number_of(line, length, "\"prompt_tokens\":")) >= 0)
            note(stream, PROMPT, (uint32_t)value, ns);
    }
    if ((value = number_of(line, length, "\"cache_n\":")) >= 0)
        note(stream, CACHED, (uint32_t)value, ns);
}

static void on_body(struct stream *stream, const char *data, size_t length, uint64_t ns)
{
    while (length > 0) {
        const char *end = memchr(data, '\n', length);
        size_t count = end ? (size_t)(end - data) : length;
        if (stream->used + count >= MAX_LINE)
            die("a line of more than %d bytes", MAX_LINE);
        memcpy(stream->line + stream->used, data, count);
        stream->used += count;
        if (end == NULL)
            return;
        stream->line[stream->used] = 0;
        if (stream->used > 6 && memcmp(stream->line, "data: ", 6) == 0)
            on_data(stream, stream->line, stream->used, ns);
        stream->used = 0;
        data += count + 1;
        length -= count + 1;
    }
}

static void on_head(struct stream *stream)
{
    stream->line[stream->used] = 0;
    if (sscanf(stream->line, "HTTP/1.1 %d", &stream->status) != 1)
        die("not an HTTP/1.1 answer: %.60s", stream->line);
    stream->is_chunked = strcasestr(stream->line, "transfer-encoding: chunked") != NULL;
    stream->closes = strcasestr(stream->line, "\r\nconnection: close") != NULL;
    const char *length = strcasestr(stream->line, "content-length:");
    stream->left = length ? strtoull(length + 15, NULL, 10) : 0;
    stream->state = stream->is_chunked ? CHUNK_SIZE : LENGTH;
    stream->used = 0;
}

static void on_chunk_size(struct stream *stream)
{
    stream->size_text[stream->size_used] = 0;
    stream->size_used = 0;
    stream->left = strtoull(stream->size_text, NULL, 16);
    stream->is_last_chunk = stream->left == 0;
    stream->state = stream->is_last_chunk ? CHUNK_END : CHUNK;
}

static void on_bytes(struct stream *stream, const char *data, const char *end, uint64_t ns)
{
    while (data < end) {
        size_t count = (size_t)(end - data);
        switch (stream->state) {
        case HEAD:
            stream->line[stream->used++] = *data++;
            if (stream->used >= 4 && memcmp(stream->line + stream->used - 4, "\r\n\r\n", 4) == 0)
                on_head(stream);
            else if (stream->used >= MAX_LINE - 1)
                die("a head of more than %d bytes", MAX_LINE);
            break;
        case CHUNK_SIZE:
            if (*data == '\n')
                on_chunk_size(stream);
            else if (stream->size_used < sizeof stream->size_text - 1)
                stream->size_text[stream->size_used++] = *data;
            data++;
            break;
        case CHUNK:
        case LENGTH:
            if (count > stream->left)
                count = stream->left;
            on_body(stream, data, count, ns);
            stream->left -= count;
            data += count;
            if (stream->left == 0 && stream->state == CHUNK)
                stream->state = CHUNK_END;
            break;
        case CHUNK_END:
            if (*data++ == '\n') {
                stream->state = CHUNK_SIZE;
                if (stream->is_last_chunk)
                    stream->left = 0;
            }
            break;
        default:
            die("connection %d: bytes that no request asked for: %.40s", stream->index, data);
        }
        int is_over = (stream->state == CHUNK_SIZE && stream->is_last_chunk) || (stream->state == LENGTH && !stream->left);
        if (is_over) {
            if (stream->texts)
                note(stream, TEXT, stream->texts, ns);
            stream->texts = 0;
            end_answer(stream, ns);
        }
    }
    if (stream->texts)
        note(stream, TEXT, stream->texts, ns);
    stream->texts = 0;
}

static void on_closed(struct stream *stream, uint64_t ns)
{
    if (stream->state == WAITING || stream->state == DONE) {
        if (stream->state == WAITING)
            reconnect(stream);
        else
            close(stream->fd);
        return;
    }
    stream->has_failed = 1;
    end_answer(stream, ns);
    if (stream->state == WAITING)
        reconnect(stream);
    else
        close(stream->fd);
}

static void on_readable(struct stream *stream)
{
    static char buffer[READ_BYTES];
    ssize_t n = read(stream->fd, buffer, sizeof buffer);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    uint64_t ns = now_ns();
    if (n <= 0) {
        on_closed(stream, ns);
        return;
    }
    summary.reads++;
    summary.bytes += (uint64_t)n;
    on_bytes(stream, buffer, buffer + n, ns);
}

static void read_calls(int connections)
{
    struct call call;
    while (fread(&call, sizeof call, 1, stdin) == 1) {
        if (call.connection >= (uint32_t)connections)
            die("call for connection %u of %d", call.connection, connections);
        struct request *request = malloc(sizeof *request + call.length);
        if (request == NULL || fread(request->bytes, 1, call.length, stdin) != call.length)
            die("the calls end early");
        request->next = NULL;
        request->length = call.length;
        request->after_ns = call.after_ns;
        struct stream *stream = &streams[call.connection];
        if (stream->first == NULL)
            stream->first = request;
        else
            stream->last->next = request;
        stream->last = request;
    }
}

/* Sends what is due; milliseconds until the next is, -1 for never. */
static int begin_due(int connections)
{
    uint64_t now = now_ns(), next = UINT64_MAX;
    for (int i = 0; i < connections; i++) {
        struct stream *stream = &streams[i];
        if (stream->state != WAITING)
            continue;
        if (stream->due_ns <= now)
            begin_request(stream);
        else if (stream->due_ns < next)
            next = stream->due_ns;
    }
    return next == UINT64_MAX ? -1 : (int)((next - now) / 1000000) + 1;
}

static void open_all(int connections)
{
    for (int i = 0; i < connections; i++) {
        struct stream *stream = &streams[i];
        stream->index = i;
        stream->state = DONE;
        if (stream->first == NULL)
            continue;
        if ((stream->line = malloc(MAX_LINE)) == NULL)
            die("no memory");
        connect_stream(stream);
        stream->state = WAITING;
        stream->due_ns = stream->first->after_ns;
        open_streams++;
    }
}

static void run(int connections, uint64_t limit_ns)
{
    struct epoll_event ready[MAX_READY];
    while (open_streams > 0) {
        int wait_ms = begin_due(connections);
        if (wait_ms < 0 || wait_ms > 1000)
            wait_ms = 1000;
        int count = epoll_wait(epoll_fd, ready, MAX_READY, wait_ms);
        for (int i = 0; i < count; i++) {
            struct stream *stream = ready[i].data.ptr;
            if (stream->state == SENDING && (ready[i].events & EPOLLOUT))
                send_request(stream);
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                on_readable(stream);
        }
        if (now_ns() > limit_ns)
            die("%d of %d connections have not finished in time", open_streams, connections);
    }
}

int main(int count, char **words)
{
    if (count != 6)
        die("usage: http_client ADDRESS PORT CONNECTIONS LIMIT_SECONDS keep|fresh");
    is_fresh = strcmp(words[5], "fresh") == 0;
    int connections = atoi(words[3]);
    server.sin_family = AF_INET;
    server.sin_port = htons((uint16_t)atoi(words[2]));
    if (inet_pton(AF_INET, words[1], &server.sin_addr) != 1)
        die("%s is no IPv4 address", words[1]);
    if (connections < 1 || connections > 4096)
        die("1 to 4096 connections");
    if ((streams = calloc((size_t)connections, sizeof *streams)) == NULL || (epoll_fd = epoll_create1(0)) < 0)
        die("no memory");
    read_calls(connections);
    open_all(connections);
    uint64_t cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    start_ns = clock_ns(CLOCK_MONOTONIC);
    run(connections, (uint64_t)(atof(words[4]) * 1e9));
    summary.wall_ns = now_ns();
    summary.cpu_ns = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu_ns;
    fwrite(&summary, sizeof summary, 1, stdout);
    fwrite(events, sizeof *events, summary.events, stdout);
    return fflush(stdout) == 0 ? 0 : 1;
}
