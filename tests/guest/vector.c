/*
 * Holds a pattern in all vector registers while other processes run, and counts how
 * often it is not there any more: YMM0 to 15, or where the CPU has AVX-512 ZMM0 to 31
 * and the mask registers k0 to k7. Arguments: seed of the pattern, context switches
 * wanted. Prints: rounds, context switches, corruptions, kind.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum {
	ROUNDS_MAX = 20000,
	YMM_BYTES = 16 * 32,
	ZMM_BYTES = 32 * 64 + 8 * 2,
};

/* Lets the other process run while the registers are loaded. */
#define YIELD "mov %2, %%eax\n syscall\n"

__attribute__((target("avx"))) static void hold_ymm(const unsigned char *pattern, unsigned char *found)
{
	__asm__ volatile(
		"vmovdqu 0(%0), %%ymm0\n vmovdqu 32(%0), %%ymm1\n vmovdqu 64(%0), %%ymm2\n"
		"vmovdqu 96(%0), %%ymm3\n vmovdqu 128(%0), %%ymm4\n vmovdqu 160(%0), %%ymm5\n"
		"vmovdqu 192(%0), %%ymm6\n vmovdqu 224(%0), %%ymm7\n vmovdqu 256(%0), %%ymm8\n"
		"vmovdqu 288(%0), %%ymm9\n vmovdqu 320(%0), %%ymm10\n vmovdqu 352(%0), %%ymm11\n"
		"vmovdqu 384(%0), %%ymm12\n vmovdqu 416(%0), %%ymm13\n vmovdqu 448(%0), %%ymm14\n"
		"vmovdqu 480(%0), %%ymm15\n"
		YIELD
		"vmovdqu %%ymm0, 0(%1)\n vmovdqu %%ymm1, 32(%1)\n vmovdqu %%ymm2, 64(%1)\n"
		"vmovdqu %%ymm3, 96(%1)\n vmovdqu %%ymm4, 128(%1)\n vmovdqu %%ymm5, 160(%1)\n"
		"vmovdqu %%ymm6, 192(%1)\n vmovdqu %%ymm7, 224(%1)\n vmovdqu %%ymm8, 256(%1)\n"
		"vmovdqu %%ymm9, 288(%1)\n vmovdqu %%ymm10, 320(%1)\n vmovdqu %%ymm11, 352(%1)\n"
		"vmovdqu %%ymm12, 384(%1)\n vmovdqu %%ymm13, 416(%1)\n vmovdqu %%ymm14, 448(%1)\n"
		"vmovdqu %%ymm15, 480(%1)\n"
		:
		: "r"(pattern), "r"(found), "i"(SYS_sched_yield)
		: "rax", "rcx", "r11", "memory", "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15");
}

__attribute__((target("avx512f"))) static void hold_zmm(const unsigned char *pattern, unsigned char *found)
{
	__asm__ volatile(
		"vmovdqu64 0(%0), %%zmm0\n vmovdqu64 64(%0), %%zmm1\n vmovdqu64 128(%0), %%zmm2\n"
		"vmovdqu64 192(%0), %%zmm3\n vmovdqu64 256(%0), %%zmm4\n vmovdqu64 320(%0), %%zmm5\n"
		"vmovdqu64 384(%0), %%zmm6\n vmovdqu64 448(%0), %%zmm7\n vmovdqu64 512(%0), %%zmm8\n"
		"vmovdqu64 576(%0), %%zmm9\n vmovdqu64 640(%0), %%zmm10\n vmovdqu64 704(%0), %%zmm11\n"
		"vmovdqu64 768(%0), %%zmm12\n vmovdqu64 832(%0), %%zmm13\n vmovdqu64 896(%0), %%zmm14\n"
		"vmovdqu64 960(%0), %%zmm15\n vmovdqu64 1024(%0), %%zmm16\n vmovdqu64 1088(%0), %%zmm17\n"
		"vmovdqu64 1152(%0), %%zmm18\n vmovdqu64 1216(%0), %%zmm19\n vmovdqu64 1280(%0), %%zmm20\n"
		"vmovdqu64 1344(%0), %%zmm21\n vmovdqu64 1408(%0), %%zmm22\n vmovdqu64 1472(%0), %%zmm23\n"
		"vmovdqu64 1536(%0), %%zmm24\n vmovdqu64 1600(%0), %%zmm25\n vmovdqu64 1664(%0), %%zmm26\n"
		"vmovdqu64 1728(%0), %%zmm27\n vmovdqu64 1792(%0), %%zmm28\n vmovdqu64 1856(%0), %%zmm29\n"
		"vmovdqu64 1920(%0), %%zmm30\n vmovdqu64 1984(%0), %%zmm31\n kmovw 2048(%0), %%k0\n"
		"kmovw 2050(%0), %%k1\n kmovw 2052(%0), %%k2\n kmovw 2054(%0), %%k3\n"
		"kmovw 2056(%0), %%k4\n kmovw 2058(%0), %%k5\n kmovw 2060(%0), %%k6\n"
		"kmovw 2062(%0), %%k7\n"
		YIELD
		"vmovdqu64 %%zmm0, 0(%1)\n vmovdqu64 %%zmm1, 64(%1)\n vmovdqu64 %%zmm2, 128(%1)\n"
		"vmovdqu64 %%zmm3, 192(%1)\n vmovdqu64 %%zmm4, 256(%1)\n vmovdqu64 %%zmm5, 320(%1)\n"
		"vmovdqu64 %%zmm6, 384(%1)\n vmovdqu64 %%zmm7, 448(%1)\n vmovdqu64 %%zmm8, 512(%1)\n"
		"vmovdqu64 %%zmm9, 576(%1)\n vmovdqu64 %%zmm10, 640(%1)\n vmovdqu64 %%zmm11, 704(%1)\n"
		"vmovdqu64 %%zmm12, 768(%1)\n vmovdqu64 %%zmm13, 832(%1)\n vmovdqu64 %%zmm14, 896(%1)\n"
		"vmovdqu64 %%zmm15, 960(%1)\n vmovdqu64 %%zmm16, 1024(%1)\n vmovdqu64 %%zmm17, 1088(%1)\n"
		"vmovdqu64 %%zmm18, 1152(%1)\n vmovdqu64 %%zmm19, 1216(%1)\n vmovdqu64 %%zmm20, 1280(%1)\n"
		"vmovdqu64 %%zmm21, 1344(%1)\n vmovdqu64 %%zmm22, 1408(%1)\n vmovdqu64 %%zmm23, 1472(%1)\n"
		"vmovdqu64 %%zmm24, 1536(%1)\n vmovdqu64 %%zmm25, 1600(%1)\n vmovdqu64 %%zmm26, 1664(%1)\n"
		"vmovdqu64 %%zmm27, 1728(%1)\n vmovdqu64 %%zmm28, 1792(%1)\n vmovdqu64 %%zmm29, 1856(%1)\n"
		"vmovdqu64 %%zmm30, 1920(%1)\n vmovdqu64 %%zmm31, 1984(%1)\n kmovw %%k0, 2048(%1)\n"
		"kmovw %%k1, 2050(%1)\n kmovw %%k2, 2052(%1)\n kmovw %%k3, 2054(%1)\n"
		"kmovw %%k4, 2056(%1)\n kmovw %%k5, 2058(%1)\n kmovw %%k6, 2060(%1)\n"
		"kmovw %%k7, 2062(%1)\n"
		:
		: "r"(pattern), "r"(found), "i"(SYS_sched_yield)
		: "rax", "rcx", "r11", "memory", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23", "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7");
}

static long context_switches(void)
{
	struct rusage usage;
	getrusage(RUSAGE_SELF, &usage);
	return usage.ru_nvcsw + usage.ru_nivcsw;
}

int main(int argc, char **argv)
{
	unsigned char pattern[ZMM_BYTES], found[ZMM_BYTES];
	unsigned long corruptions = 0;
	unsigned int seed = argc > 1 ? (unsigned int)atoi(argv[1]) : 1;
	long wanted = argc > 2 ? atol(argv[2]) : 2500;
	int zmm = __builtin_cpu_supports("avx512f");
	size_t bytes = zmm ? ZMM_BYTES : YMM_BYTES;

	for (unsigned int i = 0; i < sizeof(pattern); i++)
		pattern[i] = (unsigned char)(i * 7 + seed * 101);
	/* A yield is no switch while the other process is not there. */
	long switches = 0;
	int round = 0;
	while (switches < wanted && round < ROUNDS_MAX) {
		memset(found, 0, sizeof(found));
		if (zmm)
			hold_zmm(pattern, found);
		else
			hold_ymm(pattern, found);
		if (memcmp(pattern, found, bytes) != 0)
			corruptions++;
		if (++round % 100 == 0)
			switches = context_switches();
	}
	printf("%d %ld %lu %s\n", round, switches, corruptions, zmm ? "zmm" : "ymm");
	return 0;
}
