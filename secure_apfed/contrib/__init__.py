"""What works with another project's software, each file behind an extra of its own."""
