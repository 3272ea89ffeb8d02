// Search of the site where its pages are opened from the disk: browsers start no worker there, so
// the worker's script runs in a hidden frame instead. The name is one that mkdocs-material's plugin
// `offline` looks for; otherwise it takes a script of another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.IFrameWorker = true;
      this.inside.postMessage = data => this.tell(this, data);
      this.inside.importScripts = async (...addresses) => {
        for (const each of addresses) await this.load(each);
      };
      this.ready = this.load(address);
    }
    load(address) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(address, document.baseURI).href;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${script.src} was not loaded`));
        this.inside.document.head.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.tell(this.inside, data));
    }
    tell(target, data) {
      target.dispatchEvent(new MessageEvent("message", {data}));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
