# Print the targets of the Makefile with their ## comments, under the ##@ headings.
BEGIN { print "usage: make TARGET [NAME=value ...]" }
/^##@ / { printf "\n%s\n", substr($0, 5); next }
/^## [^ ]+: / { split(substr($0, 4), part, ": "); name = part[1]; sub(/^## [^ ]+: /, ""); printf "  %-32s %s\n", name, $0; next }
/^[A-Za-z_-]+:.*## / { name = $0; sub(/:.*/, "", name); sub(/^[^#]*## /, ""); printf "  %-32s %s\n", name, $0 }
