"""What is measured: one file each, minidist and its peers doing the same thing."""
