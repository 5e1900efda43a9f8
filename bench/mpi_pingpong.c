/* Ping-pong of large messages between ranks 0 and 1 with plain MPI calls: what bench/mpi.py compares the transport with. One line of
   JSON for each size. The buffer is the same for all messages of a size. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WARM_UP = 3, ROUND_TRIPS = 20, DONE = 1 };

int main(int count, char **arguments) {
    int level, rank, size;
    MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    for (size_t mib = 1; rank < 2 && mib <= 64; mib *= 4) {
        int bytes = (int)(mib << 20);
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
        if (rank == 0)
            printf("{\"mib\": %zu, \"bytes_per_s\": %.0f}\n", mib, 2.0 * ROUND_TRIPS * bytes / (MPI_Wtime() - start));
        free(buffer);
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
