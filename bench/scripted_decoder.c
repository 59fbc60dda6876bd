/* A decoder that answers at once, so that only the path to it and back is timed.
 *
 *     scripted_decoder [--slots N] [--flood [--pace MS]] [--context N]
 *
 * Speaks the solo dialect of the decoder protocol, or with --slots the tagged one. Of a GEN it reads max_new (and the request id)
 * and the number of prompt ids, by counting commas. It answers REUSED, max_new tokens and DONE; token i of a prompt of n ids is
 * n + i, so a benchmark can tell whose it is. Each line is a write of its own, as a decoder that flushes each step would do.
 *
 * With --flood tokens come as fast as the pipe takes them, one write a step: a step is one token of every running request (tagged)
 * or BATCH tokens of the only one (solo), and between steps it looks for commands. Without, a GEN is answered whole before the next.
 * With --pace a step is one token and comes every MS milliseconds, as a decoder's would that computes.
 */
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_SLOTS = 256, BATCH = 32, LINE = 160 };

struct turn {
    uint32_t rid;
    long prompt, max_new, generated;
};

static int slots, is_flooding, pace_ms;
static long context = 32768;
static struct turn running[MAX_SLOTS];
static int running_count;
static char out[MAX_SLOTS * LINE];
static size_t out_used;

static void flush_out(void)
{
    size_t done = 0;
    while (done < out_used) {
        ssize_t n = write(1, out + done, out_used - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            exit(0); /* the reader is gone */
        done += (size_t)n;
    }
    out_used = 0;
}

static void put_text(const char *text)
{
    size_t length = strlen(text);
    memcpy(out + out_used, text, length);
    out_used += length;
}

static void put_number(unsigned long number)
{
    char digits[24];
    int used = 0;
    do
        digits[used++] = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    while (used > 0)
        out[out_used++] = digits[--used];
}

static void end_line(const struct turn *turn)
{
    if (slots) {
        put_text(" #");
        put_number(turn->rid);
    }
    out[out_used++] = '\n';
}

static void put_token(struct turn *turn)
{
    put_text("T ");
    put_number((unsigned long)(turn->prompt + turn->generated++));
    end_line(turn);
}

static void put_done(const struct turn *turn, const char *finish)
{
    put_text("DONE ");
    put_number((unsigned long)turn->generated);
    put_text(" ");
    put_number((unsigned long)turn->prompt);
    put_text(" 0.010 0.020 ");
    put_text(finish);
    put_text(" 0 0 0");
    end_line(turn);
}

static void answer(struct turn turn)
{
    put_text("REUSED 0");
    end_line(&turn);
    flush_out();
    if (is_flooding) {
        running[running_count++] = turn;
        return;
    }
    while (turn.generated < turn.max_new) {
        put_token(&turn);
        flush_out();
    }
    put_done(&turn, "length");
    flush_out();
}

static void finish_turn(int index, const char *finish)
{
    put_done(&running[index], finish);
    running[index] = running[--running_count];
}

static void step(void)
{
    int tokens = slots || pace_ms ? 1 : BATCH;
    for (int index = running_count - 1; index >= 0; index--) {
        struct turn *turn = &running[index];
        for (int i = 0; i < tokens && turn->generated < turn->max_new; i++)
            put_token(turn);
        if (turn->generated >= turn->max_new)
            finish_turn(index, "length");
    }
    flush_out();
}

static void refuse(struct turn turn, const char *text)
{
    put_text("ERR ");
    put_text(text);
    end_line(&turn);
    flush_out();
}

static void on_gen(const char *line, const char *end)
{
    struct turn turn = {0};
    char *cursor = (char *)line + 4;
    if (slots)
        turn.rid = (uint32_t)strtoul(cursor, &cursor, 10);
    turn.max_new = strtol(cursor, &cursor, 10);
    const char *ids = memrchr(line, ' ', (size_t)(end - line));
    turn.prompt = 1;
    for (const char *comma = ids; (comma = memchr(comma, ',', (size_t)(end - comma))) != NULL; comma++)
        turn.prompt++;
    if (turn.max_new < 1 || turn.prompt + turn.max_new + 8 > context)
        refuse(turn, "the prompt and max_new do not fit the context");
    else if (is_flooding && running_count >= (slots ? slots : 1))
        refuse(turn, "busy");
    else
        answer(turn);
}

static void on_stop(const char *line)
{
    uint32_t rid = slots ? (uint32_t)strtoul(line + 4, NULL, 10) : 0;
    for (int index = running_count - 1; index >= 0; index--)
        if (running[index].rid == rid)
            finish_turn(index, "cancel");
    flush_out();
}

/* Returns 0 on QUIT. */
static int on_line(const char *line, const char *end)
{
    size_t length = (size_t)(end - line);
    if (length >= 4 && memcmp(line, "QUIT", 4) == 0)
        return 0;
    if (length >= 4 && memcmp(line, "STOP", 4) == 0)
        on_stop(line);
    else if (length >= 6 && memcmp(line, "GEN ", 4) == 0)
        on_gen(line, end);
    return 1;
}

static void announce(void)
{
    char ready[LINE];
    if (slots)
        snprintf(ready, sizeof ready, "READY %ld stop slots=%d\n", context, slots);
    else
        snprintf(ready, sizeof ready, "READY %ld stop\n", context);
    put_text("INFO vocab=151936 model=scripted backend=cpu engine=scripted-c-1\n");
    put_text(ready);
    flush_out();
}

static void read_options(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        if (strcmp(words[i], "--flood") == 0)
            is_flooding = 1;
        else if (strcmp(words[i], "--pace") == 0 && i + 1 < count)
            pace_ms = atoi(words[++i]);
        else if (strcmp(words[i], "--slots") == 0 && i + 1 < count)
            slots = atoi(words[++i]);
        else if (strcmp(words[i], "--context") == 0 && i + 1 < count)
            context = atol(words[++i]);
        else
            exit(2);
    }
    if (slots < 0 || slots > MAX_SLOTS)
        exit(2);
}

static int has_input(void)
{
    struct pollfd in = {.fd = 0, .events = POLLIN};
    return poll(&in, 1, pace_ms) > 0;
}

int main(int count, char **words)
{
    size_t size = 1 << 20, used = 0;
    char *buffer = malloc(size);
    read_options(count, words);
    announce();
    for (;;) {
        if (running_count > 0 && !has_input()) {
            step();
            continue;
        }
        if (used == size && (buffer = realloc(buffer, size *= 2)) == NULL)
            return 1;
        ssize_t n = read(0, buffer + used, size - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return 0;
        char *line = buffer, *scan = buffer + used, *end;
        used += (size_t)n;
        while ((end = memchr(scan, '\n', (size_t)(buffer + used - scan))) != NULL) {
            if (!on_line(line, end))
                return 0;
            line = scan = end + 1;
        }
        used -= (size_t)(line - buffer);
        memmove(buffer, line, used);
    }
}
