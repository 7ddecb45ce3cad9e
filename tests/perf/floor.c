// The floor under creating a microVM: fork, a KVM VM with one memory slot, interrupt
// controllers and one vCPU, and the guest's first instruction. Nothing else.
//
//   cc -O2 -o floor floor.c && ./floor COUNT MIB
//
// Prints COUNT lines: microseconds from before fork(2) until the guest's first write to a
// port has come out of KVM_RUN, as told by the child.
#include <fcntl.h>
#include <linux/kvm.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now_us(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static void check(long result, const char *step)
{
	if (result < 0) {
		perror(step);
		exit(1);
	}
}

static void child(int kvm, uint8_t *ram, size_t bytes, double start, int report)
{
	int vm = ioctl(kvm, KVM_CREATE_VM, 0);
	check(vm, "KVM_CREATE_VM");
	struct kvm_userspace_memory_region slot = {
		.memory_size = bytes, .userspace_addr = (uint64_t)ram };
	check(ioctl(vm, KVM_SET_USER_MEMORY_REGION, &slot), "KVM_SET_USER_MEMORY_REGION");
	check(ioctl(vm, KVM_CREATE_IRQCHIP, 0), "KVM_CREATE_IRQCHIP");
	int vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	check(vcpu, "KVM_CREATE_VCPU");
	int size = ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0);
	struct kvm_run *run = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	check(run == MAP_FAILED ? -1 : 0, "mmap of the vCPU");

	struct kvm_sregs sregs;
	check(ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	struct kvm_segment code = { .limit = ~0u, .selector = 0x10, .type = 11, .present = 1,
				    .s = 1, .l = 1, .g = 1 };
	struct kvm_segment data = { .limit = ~0u, .selector = 0x18, .type = 3, .present = 1,
				    .s = 1, .db = 1, .g = 1 };
	sregs.cs = code;
	sregs.ds = sregs.es = sregs.fs = sregs.gs = sregs.ss = data;
	sregs.gdt.base = 0x500;
	sregs.gdt.limit = 31;
	sregs.cr0 = 0x80050033;
	sregs.cr3 = 0x9000;
	sregs.cr4 = 0x20;
	sregs.efer = 0x500;
	check(ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	struct kvm_regs regs = { .rip = 0x100000, .rflags = 2 };
	check(ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");
	check(ioctl(vcpu, KVM_RUN, 0), "KVM_RUN");
	if (run->exit_reason != KVM_EXIT_IO) {
		fprintf(stderr, "unexpected exit %u\n", run->exit_reason);
		exit(1);
	}
	double took = now_us() - start;
	check(write(report, &took, sizeof(took)), "report");
	_exit(0);
}

int main(int count, char **words)
{
	if (count != 3) {
		fprintf(stderr, "usage: floor COUNT MIB\n");
		return 2;
	}
	int rounds = atoi(words[1]);
	size_t bytes = (size_t)atoi(words[2]) << 20;
	int kvm = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	check(kvm, "/dev/kvm");
	uint8_t *ram = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	check(ram == MAP_FAILED ? -1 : 0, "guest RAM");
	uint64_t *gdt = (uint64_t *)(ram + 0x500);
	gdt[2] = 0x00af9b000000ffff;
	gdt[3] = 0x00cf93000000ffff;
	*(uint64_t *)(ram + 0x9000) = 0xa003;
	*(uint64_t *)(ram + 0xa000) = 0xb003;
	for (uint64_t i = 0; i < 512; i++)
		((uint64_t *)(ram + 0xb000))[i] = i << 21 | 0x83;
	memcpy(ram + 0x100000, "\xe6\x80\xeb\xfc", 4); // out %al,$0x80; jmp to itself

	int report[2];
	check(pipe(report), "pipe");
	for (int i = 0; i < rounds; i++) {
		double start = now_us(), took;
		pid_t pid = fork();
		check(pid, "fork");
		if (pid == 0)
			child(kvm, ram, bytes, start, report[1]);
		check(read(report[0], &took, sizeof(took)) == sizeof(took) ? 0 : -1, "read");
		printf("%.1f\n", took);
		waitpid(pid, NULL, 0);
	}
	return 0;
}
