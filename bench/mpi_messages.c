/* Large messages between ranks 0 and 1 with plain MPI calls: what bench/mpi.py compares the transport with. One line of JSON for each
   size and pattern:

     ping-pong    one message there, one back
     window       as osu_bw: a window of messages on their way at the same time, answered by a short one when all have arrived; all
                  are sent from one buffer and received into one
     own buffers  the same, with a buffer for each message of the window, as a program has that uses what arrives */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WARM_UP = 3, ROUND_TRIPS = 20, WINDOW_MAX = 64, WINDOW_MIB = 256, DONE = 1 };

static int rank;

static double ping_pong(int bytes) {
    char *buffer = malloc(bytes);
    memset(buffer, 1, bytes);
    double start = 0;
    for (int round = 0; round < WARM_UP + ROUND_TRIPS; round++) {
        if (round == WARM_UP)
            start = MPI_Wtime();
        if (rank == 0) {
            MPI_Send(buffer, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
            MPI_Recv(buffer, bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        } else {
            MPI_Recv(buffer, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            MPI_Send(buffer, bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        }
    }
    free(buffer);
    return 2.0 * ROUND_TRIPS * bytes / (MPI_Wtime() - start);
}

static double window(int bytes, int messages, int buffers, int rounds) {
    MPI_Request requests[WINDOW_MAX];
    char *buffer[WINDOW_MAX], answer = 0;
    for (int i = 0; i < buffers; i++)
        memset(buffer[i] = malloc(bytes), 1, bytes);
    double start = 0;
    for (int round = 0; round < 1 + rounds; round++) {
        if (round == 1)
            start = MPI_Wtime();
        for (int i = 0; i < messages; i++)
            if (rank == 0)
                MPI_Isend(buffer[i % buffers], bytes, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &requests[i]);
            else
                MPI_Irecv(buffer[i % buffers], bytes, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &requests[i]);
        MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
        if (rank == 0)
            MPI_Recv(&answer, 1, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        else
            MPI_Send(&answer, 1, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
    }
    double rate = (double)rounds * messages * bytes / (MPI_Wtime() - start);
    for (int i = 0; i < buffers; i++)
        free(buffer[i]);
    return rate;
}

static void report(size_t mib, const char *pattern, double rate) {
    if (rank == 0)
        printf("{\"mib\": %zu, \"pattern\": \"%s\", \"bytes_per_s\": %.0f}\n", mib, pattern, rate);
}

int main(int count, char **arguments) {
    int level, size;
    MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (size_t mib = 1; rank < 2 && mib <= 64; mib *= 4) {
        int bytes = (int)(mib << 20);
        int messages = WINDOW_MIB / mib < WINDOW_MAX ? (int)(WINDOW_MIB / mib) : WINDOW_MAX;
        int rounds = 2048 / (messages * (int)mib);
        report(mib, "ping-pong", ping_pong(bytes));
        report(mib, "window", window(bytes, messages, 1, rounds));
        report(mib, "own buffers", window(bytes, messages, messages, rounds));
    }
    /* The ranks that are not measured sleep: a wait in MPI would take their core. */
    if (rank == 0)
        for (int other = 2; other < size; other++)
            MPI_Send(NULL, 0, MPI_BYTE, other, DONE, MPI_COMM_WORLD);
    for (int done = rank < 2; !done; usleep(5000))
        MPI_Iprobe(0, DONE, MPI_COMM_WORLD, &done, MPI_STATUS_IGNORE);
    MPI_Finalize();
    return 0;
}
