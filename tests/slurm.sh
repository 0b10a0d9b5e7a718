#!/usr/bin/env bash
# The daemons of a small Slurm, in namespaces of their own: slurm.sh FOLDER NODES, called by tests/slurm.py.
#
# Each node is a network namespace with a host name and an address (10.77.0.1 is n1); the head is 10.77.0.254. All of it
# is in one PID namespace, so that it ends with its first process: this one, which waits until it is killed. Nothing of
# the machine is changed: no systemd, no control groups, no database. FOLDER has slurm.conf and hosts already.
set -euo pipefail

if [ "$1" != inside ]; then
    exec unshare --mount --pid --fork --kill-child --mount-proc --net --uts --propagation private "$0" inside "$@"
fi
root=${MESHWISE_SLURM_ROOT:-}
if [ -n "$root" ]; then # the rest happens in that Debian, with the folders of this machine that are not the system's
    mount --bind "$root" "$root"
    touch "$root/etc/hosts" # a small Debian has none
    for there in /*/; do
        case $there in /bin/ | /boot/ | /etc/ | /lib* | /run/ | /sbin/ | /usr/ | /var/) continue ;; esac
        mkdir -p "$root$there"
        mount --rbind "$there" "$root$there"
    done
    MESHWISE_SLURM_ROOT="" exec chroot "$root" "$0" "$@"
fi
folder=$2 nodes=$3
export SLURM_CONF=$folder/slurm.conf

hostname head
ip link set lo up
if [ -n "${CLOSED:-}" ]; then # a folder of root's has Python in it, which other users are to run too
    mkdir "$folder/open"
    mount -t tmpfs -o mode=755 none "$folder/open"
    mkdir "$folder/open/$(basename "$OPENED")"
    mount --bind "$OPENED" "$folder/open/$(basename "$OPENED")"
    mount --rbind "$folder/open" "$CLOSED"
fi
mkdir -p /run/netns
mount -t tmpfs none /run/netns
mount --make-shared /run/netns
mount --bind "$folder/hosts" /etc/hosts
ip link add br0 type bridge
ip address add 10.77.0.254/24 dev br0
ip link set br0 up
for node in $(seq "$nodes"); do
    ip netns add "n$node"
    ip link add "v$node" type veth peer name eth0 netns "n$node"
    ip link set "v$node" master br0 up
    ip -n "n$node" address add "10.77.0.$node/24" dev eth0
    ip -n "n$node" link set eth0 up
    ip -n "n$node" link set lo up
done

mkdir -p "$folder/state" "$folder/log"
head -c 128 /dev/urandom >"$folder/munge.key"
chmod 600 "$folder/munge.key"
# One munged for all: its socket belongs to the file system, not to a network namespace.
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munged.seed" --log-file="$folder/log/munged.log" \
    >"$folder/log/munged.out" 2>&1 &
until [ -S "$folder/munge.socket" ]; do sleep 0.05; done
slurmctld -D >"$folder/log/slurmctld.out" 2>&1 &
# nsenter, not `ip netns exec`: that one mounts /sys anew, and slurmd then finds no control groups and gives up.
for node in $(seq "$nodes"); do
    mkdir -p "$folder/spool-n$node"
    nsenter --net="/run/netns/n$node" unshare --uts bash -c "hostname n$node; exec slurmd -D" \
        >"$folder/log/slurmd-n$node.out" 2>&1 &
done
for _ in $(seq 200); do
    [ "$(sinfo -h -t idle -o %D 2>/dev/null || true)" = "$nodes" ] && break
    sleep 0.1
done
touch "$folder/ready"
sleep infinity
