# Make the container of a pod of mounts of one's own: /dev with a termination log, and the secret as
# the kubelet mounts it.
#
#     sh -e pod.sh FOLDER MODE
#
# FOLDER/secret is the secret; without it none is mounted. FOLDER/termination-log is what is left.
folder=$1 mode=$2
mkdir "$folder/dev" "$folder/etc"
touch "$folder/termination-log"
mount -t tmpfs tmpfs "$folder/dev"
for device in null zero full random urandom tty; do
    touch "$folder/dev/$device"
    mount --bind "/dev/$device" "$folder/dev/$device"
done
ln -s /proc/self/fd "$folder/dev/fd"
mkdir "$folder/dev/shm"
mount --bind /dev/shm "$folder/dev/shm"
touch "$folder/dev/termination-log"
mount --bind "$folder/termination-log" "$folder/dev/termination-log"
mount --rbind "$folder/dev" /dev
if [ -e "$folder/secret" ]; then
    cp -a /etc/. "$folder/etc"
    mkdir "$folder/etc/rallypoint"
    mount -t tmpfs tmpfs "$folder/etc/rallypoint"
    mkdir "$folder/etc/rallypoint/..2026_11_24"
    install -m "$mode" "$folder/secret" "$folder/etc/rallypoint/..2026_11_24/secret"
    ln -s ..2026_11_24 "$folder/etc/rallypoint/..data"
    ln -s ..data/secret "$folder/etc/rallypoint/secret"
    mount -o remount,ro "$folder/etc/rallypoint"
    mount --rbind "$folder/etc" /etc
fi
