#!/usr/bin/env bash
# An Elasticsearch node for tests, in the foreground: start.sh DATA_DIR [PORT]
# PORT 0 or none: a free one. When it answers, DATA_DIR/http.port holds the port. SIGTERM ends it.
# start.sh --build only builds. Variables:
#   ES_BUILD_DIR   where it is built on first use (default: the user's cache folder)
#   ES_HEAP        heap size, 512m
#   ES_JAVA_OPTS   more JVM flags; the last one wins
#   ES_LOG         log level, WARN
#   ES_JAVA_HOME   a Java runtime, where neither JAVA_HOME nor /usr/lib/jvm has one of version 21 or newer
# Exit 3: there is no such runtime. A compiler is not needed on the machine: it is fetched with the server.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: start.sh DATA_DIR [PORT] | start.sh --build"

major() { sed -nE 's/^JAVA_VERSION="([0-9]+).*/\1/p' "$1/release" 2> /dev/null; }

find_java() {
  local home version
  for home in "${JAVA_HOME:-}" /usr/lib/jvm/* "${ES_JAVA_HOME:-}"; do
    version=$(major "$home") || continue
    [[ -x $home/bin/java ]] && ((${version:-0} >= 21)) && echo "$home" && return
  done
  echo "no Java runtime of version 21 or newer in JAVA_HOME, /usr/lib/jvm or ES_JAVA_HOME" >&2
  return 3
}

# A released server brings its own libzstd; here the system's takes its place. Without one the
# node still runs, with all native calls off and a stack trace that says so.
link_zstd() {
  local found arch to
  found=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p | sed -nE 's/^\s*libzstd\.so\.1 .*=> //p' | head -n 1)
  case $(uname -m) in x86_64) arch=x64 ;; *) arch=$(uname -m) ;; esac
  to=$1/lib/platform/linux-$arch
  mkdir -p "$to"
  [[ -z $found ]] || ln -sf "$found" "$to/libzstd.so"
}

node() { # BUILT DATA PORT [JVM flags]
  local built=$1 data=$2 port=$3
  shift 3
  mkdir -p "$data/tmp"
  exec "$java/bin/java" -Xms"${ES_HEAP:-512m}" -Xmx"${ES_HEAP:-512m}" \
    -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "$@" \
    --module-path "$built/home/lib" --add-modules ALL-MODULE-PATH \
    --enable-native-access=ALL-UNNAMED,org.apache.lucene.core,org.elasticsearch.foreign,org.elasticsearch.nativeaccess \
    -Djava.io.tmpdir="$data/tmp" \
    -Dnode.log="${ES_LOG:-WARN}" \
    -Des.path.home="$built/home" \
    -Dorg.elasticsearch.nativeaccess.enableVectorLibrary=false \
    -Dio.netty.noUnsafe=true \
    -Dlog4j2.disable.jmx=true \
    -cp "$built/node.jar" EsNode "$built/home" "$data" "$port"
}

compile() { # CLASSES_DIR JAR SOURCE...
  "$java/bin/java" -jar "$built"/compiler/ecj-*.jar -source 21 -target 21 -proc:none -nowarn \
    -classpath "$(printf '%s:' "$built"/home/lib/*.jar)" -d "$1" "${@:3}"
  (cd "$1" && python3 -m zipfile -c "$2" ./*)
}

build() {
  local version netty=$built/home/modules/transport-netty4 shims=$built/home/plugins/rest-shims
  mvn -q -B -f "$here/pom.xml" package -Dhome="$built/home"
  version=$(basename "$built"/home/lib/elasticsearch-core-*.jar .jar)
  python3 -m zipfile -e "$netty"/transport-netty4-*.jar "$built/unpacked"
  mv "$built"/unpacked/META-INF/es-plugins/transport-netty4/* "$netty"
  rm -r "$built/unpacked"
  # A runtime without a JDK's tools has no jdk.jdi, which the server names as a need.
  "$java/bin/java" --list-modules | grep '^jdk\.jdi@' > /dev/null ||
    python3 "$here/retarget.py" "$built"/home/lib/elasticsearch-entitlement-[0-9]*.jar
  mkdir -p "$shims"
  sed "s/\${elasticsearch.version}/${version#elasticsearch-core-}/" \
    "$here/java/shims/plugin-descriptor.properties" > "$shims/plugin-descriptor.properties"
  compile "$built/classes/shims" "$shims/rest-shims.jar" "$here"/java/shims/test/shims/*.java
  compile "$built/classes/node" "$built/node.jar" "$here"/java/node/EsNode.java
  link_zstd "$built/home"
  # One start that leaves the JVM's own cache of loaded classes: later starts take a third of the time.
  if (($(major "$java") >= 25)); then
    (node "$built" "$built/once" 0 -Dnode.once=true -XX:AOTCacheOutput="$built/classes.aot" -Xlog:aot=error)
    rm -rf "$built/once"
  fi
}

[[ $# -ge 1 ]] || { echo "$usage" >&2 && exit 2; }
java=$(find_java) || exit 3
cache=${ES_BUILD_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/elasticsearch-test-node}
built=$cache/$( (cd "$here" && cat pom.xml start.sh retarget.py $(find java -type f | LC_ALL=C sort); cat "$java/release") |
  sha256sum | cut -c1-12)
mkdir -p "$cache"
exec 9> "$cache/lock"
flock 9
if [[ ! -e $built/ok ]]; then
  rm -rf "$built"
  mkdir -p "$built"
  build >&2 9>&-
  touch "$built/ok"
fi
exec 9>&-
[[ $1 != --build ]] || exit 0

opts=()
[[ ! -e $built/classes.aot ]] || opts+=(-XX:AOTCache="$built/classes.aot" -Xlog:disable -Xlog:all=error)
# shellcheck disable=SC2206
opts+=(${ES_JAVA_OPTS:-})
node "$built" "$1" "${2:-0}" "${opts[@]}"
