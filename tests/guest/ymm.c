/*
 * Holds a pattern in all YMM registers while other processes run, and counts how
 * often it is not there any more. Prints: rounds, involuntary context switches,
 * corruptions.
 */
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { REGISTERS = 16, SECONDS = 6, SPIN = 2000 };

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Loads the pattern, spins without touching the registers, stores them. */
static void hold(const unsigned char *pattern, unsigned char *found)
{
	__asm__ volatile(
		"vmovdqu (%0), %%ymm0\n vmovdqu 32(%0), %%ymm1\n vmovdqu 64(%0), %%ymm2\n vmovdqu 96(%0), %%ymm3\n"
		"vmovdqu 128(%0), %%ymm4\n vmovdqu 160(%0), %%ymm5\n vmovdqu 192(%0), %%ymm6\n vmovdqu 224(%0), %%ymm7\n"
		"vmovdqu 256(%0), %%ymm8\n vmovdqu 288(%0), %%ymm9\n vmovdqu 320(%0), %%ymm10\n vmovdqu 352(%0), %%ymm11\n"
		"vmovdqu 384(%0), %%ymm12\n vmovdqu 416(%0), %%ymm13\n vmovdqu 448(%0), %%ymm14\n vmovdqu 480(%0), %%ymm15\n"
		"mov %2, %%rcx\n"
		"1: dec %%rcx\n jnz 1b\n"
		"vmovdqu %%ymm0, (%1)\n vmovdqu %%ymm1, 32(%1)\n vmovdqu %%ymm2, 64(%1)\n vmovdqu %%ymm3, 96(%1)\n"
		"vmovdqu %%ymm4, 128(%1)\n vmovdqu %%ymm5, 160(%1)\n vmovdqu %%ymm6, 192(%1)\n vmovdqu %%ymm7, 224(%1)\n"
		"vmovdqu %%ymm8, 256(%1)\n vmovdqu %%ymm9, 288(%1)\n vmovdqu %%ymm10, 320(%1)\n vmovdqu %%ymm11, 352(%1)\n"
		"vmovdqu %%ymm12, 384(%1)\n vmovdqu %%ymm13, 416(%1)\n vmovdqu %%ymm14, 448(%1)\n vmovdqu %%ymm15, 480(%1)\n"
		:
		: "r"(pattern), "r"(found), "r"((long)SPIN)
		: "rcx", "memory", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9",
		  "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15");
}

int main(int argc, char **argv)
{
	unsigned char pattern[REGISTERS * 32], found[REGISTERS * 32];
	unsigned long rounds = 0, corruptions = 0;
	unsigned int seed = argc > 1 ? (unsigned int)atoi(argv[1]) : 1;
	double end = now() + SECONDS;

	for (unsigned int i = 0; i < sizeof(pattern); i++)
		pattern[i] = (unsigned char)(i * 7 + seed * 101);
	do {
		memset(found, 0, sizeof(found));
		hold(pattern, found);
		rounds++;
		if (memcmp(pattern, found, sizeof(found)) != 0)
			corruptions++;
	} while (now() < end);

	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	printf("%lu %ld %lu\n", rounds, usage.ru_nivcsw, corruptions);
	return 0;
}
