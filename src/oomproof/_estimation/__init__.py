"""How much memory a step will take: engines that find out, and allocators that memory is handed out by."""
