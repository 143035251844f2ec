"""What every tool shares towards its user: options, tables, histograms, pictures, traces."""
