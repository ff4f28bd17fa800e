"""Show what ranks print and display, where the code that started them would print."""
