"""What there is: RAM, GPUs, and what a framework can use of them."""
