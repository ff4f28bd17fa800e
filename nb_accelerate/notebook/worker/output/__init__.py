"""What a rank prints and displays, on its way to the kernel."""
