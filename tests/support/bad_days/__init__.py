"""The proof of the redesigned NSQ's bad days: ordered messages published and consumed while a cluster has every fault.

records     what a client did, as rows of a file that outlives the client's death
publisher   a program that publishes keyed messages and keeps a row of each result
consumer    a program that consumes them and keeps rows of each message begun and finished
clients     starts, kills and ends those programs
watch       which leaders lookup names, and what plain connections to them can do: no client of ours is asked
faults      what is done to the cluster
check       rows -> what was lost, doubled, out of order, begun too early
windows     rows and what was watched -> how long clients took to follow a leader
report      all of it as Markdown, at most 80 columns wide, and as JSON
run         the whole
"""
